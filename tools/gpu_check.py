"""FP8 on an NVIDIA GPU: are the kernels right, how fast are they, does a model train. One table, one line of JSON.

    python tools/gpu_check.py                    # a machine with a GPU; within 5 minutes
    python tools/gpu_check.py out=tools/results/gpu_check.md
    python tools/gpu_check.py --dry              # without one: Triton's interpreter, small shapes, no speeds

Needs torch, triton and hydra-core, and this repository. A line that fails says why and the rest goes on; the exit code
is 1 if any did. What a machine cannot do (a backend whose package is missing) is left out by name.

    right     every kernel beside its plain PyTorch definition; products beside float64 of the quantised operands; the
              average of the weights, which a thread fetches, beside float64
    products  TFLOPS at DeepGEMM's published shapes, M = 4096, beside the other backends and BF16
    bandwidth quantisers, in bytes that must be read and written, beside a copy on the device
    training  `small` learns one batch of random tokens, FP8 beside BF16
"""

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from gpu_average import average  # noqa: E402
from gpu_right import normal, right  # noqa: E402

from dstrain.config.errors import InputError  # noqa: E402
from dstrain.precision.fp8_gemm import BACKENDS, Scaled, backend  # noqa: E402
from dstrain.precision.kernels import blocks, e5m6, permute, rms_norm, swiglu, tiles  # noqa: E402
from dstrain.precision.kernels.interpreter import correct_casts  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
BUDGET = 270.0  # seconds after which no further line is begun
BEGAN = time.perf_counter()
# N, K and DeepGEMM's TFLOPS on an H800 (REFERENCE §5)
DENSE = [
    (2112, 7168, 1058), (24576, 1536, 990), (32768, 512, 590),
    (7168, 16384, 1358), (4096, 7168, 1304), (7168, 2048, 1025),
]
GROUPED = [(4096, 7168, 1288), (7168, 2048, 1093)]
ROWS, EXPERTS = 4096, 8
if DRY:
    DENSE, GROUPED, ROWS, EXPERTS = [(136, 256, None)], [(144, 128, None)], 40, 3


class Report:
    """Lines of the table as they come, and what is left of them for the JSON."""

    def __init__(self):
        self.lines, self.failed, self.left_out, self.numbers = [], [], [], {}

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)

    def line(self, section: str, name: str, work) -> None:
        """One line: `work()` gives its text, or (text, number); anything it raises is a failure."""
        if time.perf_counter() - BEGAN > BUDGET:
            return self.omit(section, name, "out of time")
        try:
            text = work()
            text, number = text if isinstance(text, tuple) else (text, None)
            if number is not None:
                self.numbers[f"{section} {name}"] = number
        except Exception as error:
            if isinstance(error, InputError) and str(error).startswith("precision.backend="):
                return self.omit(section, name, str(error))
            text = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.failed.append(f"{section} {name}")
        self.say(f"| {section} | {name} | {text} |")

    def omit(self, section: str, name: str, why: str) -> None:
        self.left_out.append(f"{section} {name}: {why}")
        self.say(f"| {section} | {name} | left out: {why} |")


def main() -> int:
    options = [argument for argument in sys.argv[1:] if argument != "--dry"]
    if any(not option.startswith("out=") for option in options):
        sys.exit(f"unknown option in {options}; valid: --dry, out=FILE")
    if DRY:
        correct_casts()
    elif not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU: torch.cuda.is_available() is false; --dry checks the kernels in Triton's interpreter")
    report = Report()
    device = "interpreter on a CPU" if DRY else torch.cuda.get_device_name()
    report.say(f"{device}; torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}\n")
    report.say("| section | what | result |\n|---|---|---|")
    right(report, DEVICE, DRY)
    average(report, DEVICE, DRY)
    for section in (products, grouped_products, bandwidth, training):
        section(report)
    seconds = time.perf_counter() - BEGAN
    report.say(f"\n{len(report.failed)} failed, {len(report.left_out)} left out, {seconds:.0f} s")
    summary = {
        "device": device, "torch": torch.__version__, "triton": triton.__version__, "dry": DRY, "seconds": seconds,
        "failed": report.failed, "left_out": report.left_out, "numbers": report.numbers,
    }
    for option in options:
        text = "\n".join(report.lines)
        Path(option.removeprefix("out=")).write_text(f"{text}\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))
    return int(bool(report.failed))


# Fast ------------------------------------------------------------------------------------------------------------


def seconds(work) -> float:
    """Median time of one run, its inputs not in the L2 cache."""
    if not DRY:
        return triton.testing.do_bench(work, warmup=20, rep=80, return_mode="median") / 1e3
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def speed(report: Report, name: str, flop: float, published: float | None, contestants: dict) -> None:
    """A line a contestant: TFLOPS, and the share of the published figure."""
    for who, prepare in contestants.items():
        def work(prepare=prepare):
            tflops = flop / seconds(prepare()) / 1e12
            if DRY:
                return "ran"
            beside = f", {tflops / published:.0%} of DeepGEMM's {published} on an H800" if published else ""
            return f"{tflops:.0f} TFLOPS{beside}", tflops

        report.line("products", f"{name}, {who}", work)


def chosen(name: str):
    return backend(name, DEVICE)


def backends() -> list[str]:
    return [name for name in BACKENDS if name != "emulated"]


def products(report: Report) -> None:
    for n, k, published in DENSE:
        x, weight = normal(DEVICE, ROWS, k, seed=0).bfloat16(), normal(DEVICE, n, k, seed=1).bfloat16()
        a, b = tiles.quantize_rows(x), blocks.quantize_weight(weight)[0]

        def fp8(name, a=a, b=b):
            one = chosen(name)
            return lambda: one.matmul(Scaled(*a), Scaled(*b), torch.bfloat16)

        contestants = {name: lambda name=name, fp8=fp8: fp8(name) for name in backends()}
        contestants["BF16 matmul"] = lambda x=x, weight=weight: lambda: x @ weight.t()
        speed(report, f"{ROWS} x {n} x {k}", 2 * ROWS * n * k, published, contestants)


def grouped_products(report: Report) -> None:
    for n, k, published in GROUPED:
        rows = EXPERTS * ROWS
        shares = torch.linspace(0.7, 1.3, EXPERTS)  # uneven loads, filled up to 128 as the other libraries need
        counts = (shares * ROWS / 128).round().int() * 128 if not DRY else (shares * ROWS).int()
        counts[-1] = rows - counts[:-1].sum()
        offsets = counts.cumsum(0).int().to(DEVICE)
        sizes = [(rows, k), (rows, n), (EXPERTS, n, k)]
        x, dy, weight = (normal(DEVICE, *size, seed=seed).bfloat16() for seed, size in enumerate(sizes))
        a, b = tiles.quantize_rows(x), blocks.quantize_weight(weight)[0]
        dy_columns, x_columns = tiles.quantize_columns(dy, offsets), tiles.quantize_columns(x, offsets)
        out = torch.zeros(EXPERTS, n, k, device=DEVICE)
        operands = (a, b, offsets, dy_columns, x_columns, out)

        def forward(name, operands=operands):
            a, b, offsets, *_ = operands
            one = chosen(name)
            return lambda: one.grouped_matmul(Scaled(*a), Scaled(*b), offsets, torch.bfloat16)

        def wgrad(name, operands=operands):
            *_, offsets, dy_columns, x_columns, out = operands
            one = chosen(name)
            return lambda: one.grouped_accumulate(Scaled(*dy_columns), Scaled(*x_columns), offsets, out)

        flop, size = 2 * rows * n * k, f"{EXPERTS} experts, {rows} x {n} x {k}"
        contestants = {name: lambda name=name, forward=forward: forward(name) for name in backends()}
        contestants["BF16 grouped_mm"] = lambda x=x, w=weight, o=offsets: lambda: F.grouped_mm(x, w.mT, offs=o)
        speed(report, size, flop, published, contestants)
        contestants = {name: lambda name=name, wgrad=wgrad: wgrad(name) for name in backends()}
        contestants["BF16 grouped_mm"] = lambda x=x, dy=dy, o=offsets: lambda: F.grouped_mm(dy.t(), x, offs=o)
        speed(report, f"{size}, Wgrad", flop, None, contestants)


def bandwidth(report: Report) -> None:
    rows, cols = (40, 256) if DRY else (16384, 7168)
    x = normal(DEVICE, rows, cols, seed=0).bfloat16()
    target, n, mid = torch.empty_like(x), rows * cols, cols // 2
    codes = tiles.quantize_rows(x)
    packed = e5m6.quantize_e5m6(x)
    gate, up, weight = x[:, :mid].contiguous(), x[:, mid:].contiguous(), normal(DEVICE, rows, seed=1)
    kept = swiglu.swiglu_quantize(gate, up, weight)[1:]
    norm, index = torch.ones(cols, device=DEVICE), torch.arange(rows - 1, -1, -1, device=DEVICE)
    half = rows * mid
    work = {  # name: what runs, bytes without scales
        "copy": (lambda: target.copy_(x), 4 * n),
        "1x128 tiles": (lambda: tiles.quantize_rows(x), 3 * n),
        "both orientations": (lambda: tiles.quantize_both(x), 4 * n),
        "requantise to columns": (lambda: tiles.requantize_columns(*codes), 2 * n),
        "dequantise": (lambda: tiles.dequantize_rows(*codes, torch.bfloat16), 3 * n),
        "blocks, W and its transpose": (lambda: blocks.quantize_weight(x), 4 * n),
        "E5M6": (lambda: e5m6.quantize_e5m6(x), 3.5 * n),
        "E5M6 to columns": (lambda: e5m6.e5m6_to_columns(*packed, cols), 2.5 * n),
        "SwiGLU": (lambda: swiglu.swiglu_quantize(gate, up, weight), 7 * half),
        "SwiGLU backward": (lambda: swiglu.swiglu_backward_quantize(gate, *kept, weight), 9 * half),
        "RMSNorm": (lambda: rms_norm.rms_norm_quantize(x, norm, 1e-6), 3 * n),
        "permute": (lambda: permute.permute(*codes, index), 2 * n),
        "unpermute": (lambda: permute.unpermute(x, index.view(-1, 2)), 3 * n),
    }
    copy = []
    for name, (run, size) in work.items():
        def line(run=run, size=size):
            rate = size / seconds(run) / 1e9
            if DRY:
                return "ran"
            copy.append(rate)
            return f"{rate:.0f} GB/s, {rate / copy[0]:.0%} of a copy", rate

        report.line("bandwidth", name, line)


# Training --------------------------------------------------------------------------------------------------------


def training(report: Report) -> None:
    losses = {}

    def train(precision):
        times, values = train_small(precision)
        losses[precision] = values
        if not all(map(math.isfinite, values)) or values[-1] >= values[0]:
            raise AssertionError(f"the loss does not fall: {values}")
        return f"loss {values[0]:.4f} to {values[-1]:.4f}, {statistics.median(times) * 1e3:.0f} ms a step", values[-1]

    for precision in ("bf16", "fp8"):
        report.line("training", precision, lambda precision=precision: train(precision))

    def gap():
        bf16, fp8 = losses["bf16"], losses["fp8"]
        distance = max(abs(a - b) for a, b in zip(bf16, fp8, strict=True)) / bf16[0]
        if not distance < 0.02:
            raise AssertionError(f"they differ by up to {distance:.2%} of the first loss, more than 2 %: {bf16}, {fp8}")
        return f"up to {distance:.2%} of the first loss", distance

    report.line("training", "distance of the two losses", gap)


def train_small(precision_name: str) -> tuple[list[float], list[float]]:
    """Steps on one batch of random tokens, with the package's own model, products and optimizer. -> seconds, losses."""
    from dstrain.config.compose import compose
    from dstrain.model.batch import MicroBatch
    from dstrain.model.init import initial_value
    from dstrain.model.loss import LossSums, LossWeights
    from dstrain.model.model import Model
    from dstrain.model.units import forward_backward
    from dstrain.parallel.dispatch import LocalDispatcher
    from dstrain.precision.main_grad import attach_main_grads
    from dstrain.precision.policy import resolve_precision
    from dstrain.train.optimizer import AdamW

    sizes, overrides = ("small", 30, 1024, 8, 2), []
    if DRY:
        sizes = "tiny", 2, 24, 1, 1
        small = {
            "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
            "num_attention_heads": 2, "q_lora_rank": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "num_nextn_predict_layers": 0,
        }
        overrides = [f"model.{key}={value}" for key, value in small.items()]
    model_name, steps, length, sequences, micro = sizes
    config = compose("train", [f"model={model_name}", f"precision={precision_name}", *overrides])[0]
    precision = resolve_precision(precision_name, DEVICE, "triton")
    with DEVICE:
        model = Model(config.model, precision.compute, fp8=precision.fp8)
    attach_main_grads(model, precision.main)
    optimizer = AdamW(model, config.optim, precision)
    for name, state in optimizer.states.items():
        optimizer.set_weight(name, initial_value(name, state.parameter.shape, config.model, 0, state.master.dtype))
    depth = config.model.num_nextn_predict_layers
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.model.vocab_size, (sequences, length + 1 + depth), generator=generator).to(DEVICE)
    batches = [MicroBatch(part, torch.zeros_like(part), depth, False) for part in tokens.split(micro)]
    counts = torch.stack([batch.valid_counts() for batch in batches]).sum(0).tolist()
    weights = LossWeights.of_batch(counts, sequences, 0.3, config.model.depth_weights, config.optim.balance_alpha)
    times, losses = [], []
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        sums = LossSums(depth, DEVICE)
        for batch in batches:
            forward_backward(model, batch, LocalDispatcher(), sums, weights)
        losses.append(sums.depths[0].item() / counts[0])
        clip = min(1.0, 1.0 / (optimizer.grad_norm().item() + 1e-6))
        optimizer.step(1e-3, step, clip)
        for router in model.routers:
            router.load.zero_()
        times.append(time.perf_counter() - begin)
    return times, losses


if __name__ == "__main__":
    sys.exit(main())
