"""FP8 on an NVIDIA GPU: are the kernels right, how fast are they, does a model train. One table, one line of JSON.

    python tools/gpu_check.py                    # a machine with a GPU; within 5 minutes
    python tools/gpu_check.py out=tools/results/gpu_check.md
    python tools/gpu_check.py --dry              # without one: Triton's interpreter, small shapes; its speeds mean nothing

Needs torch, triton and hydra-core, and this repository. A line that fails says why and the rest goes on; the exit code
is 1 if any did. What a machine cannot do (a backend whose package is missing) is left out by name.

    right     every kernel beside its plain PyTorch definition; products beside float64 of the quantised operands
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from fp8_cases import adversarial, alike, same  # noqa: E402

from dstrain.config.errors import InputError  # noqa: E402
from dstrain.precision import e5m6 as e5m6_definition  # noqa: E402
from dstrain.precision import fp8_blocks, fp8_tiles  # noqa: E402
from dstrain.precision.fp8_gemm import BACKENDS, Scaled, backend  # noqa: E402
from dstrain.precision.kernels import (  # noqa: E402
    blocks, definitions, e5m6, gemm, grouped_gemm, permute, rms_norm, swiglu, tiles,
)
from dstrain.precision.kernels.interpreter import correct_casts  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
BUDGET = 270.0  # seconds after which no further line is begun
BEGAN = time.perf_counter()
# N, K and DeepGEMM's TFLOPS on an H800 (REFERENCE §5)
DENSE = [(2112, 7168, 1058), (24576, 1536, 990), (32768, 512, 590), (7168, 16384, 1358), (4096, 7168, 1304), (7168, 2048, 1025)]
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
    for section in (right, products, grouped_products, bandwidth, training):
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


# Right -----------------------------------------------------------------------------------------------------------


def right(report: Report) -> None:
    def compare(name, result, expected, equal=same):
        def work():
            if not equal(result(), expected()):
                raise AssertionError("differs from the definition")
            return "equal bit by bit" if equal is same else "equal but for the last bit of FP32"

        report.line("right", name, work)

    for rows, cols in [(70, 130)] if DRY else [(1, 1), (133, 192), (576, 7168), (2112, 1536)]:
        for dtype in (torch.bfloat16, torch.float32):
            x = adversarial(rows, cols, dtype).to(DEVICE)
            name = f"{rows} x {cols} {str(dtype).removeprefix('torch.')}"
            offsets = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32, device=DEVICE)
            for power in (True, False):
                kind = f"{name}, {'power-of-two' if power else 'FP32'} scales"
                compare(f"1x128 tiles, {kind}", lambda: tiles.quantize_rows(x, power), lambda: fp8_tiles.quantize_rows(x, power))
                compare(
                    f"both orientations, {kind}", lambda: tiles.quantize_both(x, None, power),
                    lambda: (fp8_tiles.quantize_rows(x, power), fp8_tiles.quantize_columns(x, None, power)),
                )
                compare(
                    f"columns of experts, {kind}", lambda: tiles.quantize_columns(x, offsets, power),
                    lambda: definitions.columns(x, offsets, power),
                )
                compare(
                    f"128x128 blocks, {kind}", lambda: blocks.quantize_weight(x, power)[0],
                    lambda: fp8_blocks.quantize_blocks(x, power),
                )
            compare(f"E5M6, {name}", lambda: e5m6.quantize_e5m6(x), lambda: e5m6_definition.quantize_e5m6(x))
            packed = e5m6_definition.quantize_e5m6(x)
            compare(
                f"E5M6 to columns, {name}", lambda: e5m6.e5m6_to_columns(*packed, cols),
                lambda: e5m6_definition.e5m6_to_columns(*packed, cols),
            )
    rows, cols = (70, 256) if DRY else (4096, 2048)
    gate, up, grad = (normal(rows, cols, seed=seed).bfloat16() for seed in range(3))
    weight = normal(rows, 1, seed=3).flatten()
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=DEVICE)
    kept = definitions.swiglu_quantize(gate, up, weight)[1:]
    compare("SwiGLU", lambda: swiglu.swiglu_quantize(gate, up, weight), lambda: definitions.swiglu_quantize(gate, up, weight), alike)
    compare(
        "SwiGLU backward", lambda: swiglu.swiglu_backward_quantize(grad, *kept, weight, offsets),
        lambda: definitions.swiglu_backward_quantize(grad, *kept, weight, offsets), alike,
    )
    norm = normal(1, cols, seed=4)[0].contiguous()
    compare(
        "RMSNorm", lambda: rms_norm.rms_norm_quantize(gate, norm, 1e-6),
        lambda: definitions.rms_norm_quantize(gate, norm, 1e-6), alike,
    )
    index = (torch.arange(3 * rows, device=DEVICE) * 7) % rows
    compare("permute", lambda: permute.permute(*kept[0], index), lambda: definitions.permute(*kept[0], index))
    slots = index.view(rows, 3) - 1
    compare("unpermute", lambda: permute.unpermute(gate, slots), lambda: definitions.unpermute(gate, slots))
    for name, (result, a, b) in product_cases().items():
        report.line("right", name, lambda result=result, a=a, b=b: product_error(result(), a, b))


def product_cases() -> dict:
    """Name: what computes a product in FP32, and its operands in float64. Ragged sizes, experts without rows."""
    m, n, k, counts = (70, 150, 300, [5, 0, 65]) if DRY else (1000, 1100, 1296, [700, 0, 300])
    offsets = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    x, dy, weight = normal(m, k, seed=5), normal(m, n, seed=6), normal(len(counts), n, k, seed=7)
    a, b = fp8_tiles.quantize_rows(x), fp8_blocks.quantize_blocks(weight)
    dense = [part.double() for part in (fp8_tiles.dequantize_rows(*a, torch.float32), fp8_blocks.dequantize_blocks(*b, torch.float32))]
    columns = [fp8_tiles.quantize_columns(y) for y in (dy, x)]
    by_expert = [definitions.columns(y, offsets) for y in (dy, x)]
    wide = [fp8_tiles.dequantize_columns(*fp8_tiles.quantize_columns(y, offsets), offsets, torch.float32) for y in (dy, x)]

    def run(function, size, *arguments, **named):
        out = torch.zeros(size, device=DEVICE)
        function(*arguments, out, **named)
        return out

    parts = [[y.double() for y in x.split(counts, dim=1)] for x in wide]
    return {
        "product": (lambda: run(gemm.matmul, (m, n), *a, b[0][0], b[1][0]), dense[0], dense[1][0]),
        "product into FP32": (
            lambda: run(gemm.matmul, (n, k), *columns[0], *columns[1], accumulate=True),
            *(fp8_tiles.dequantize_columns(*c, None, torch.float32).double() for c in columns),
        ),
        "product of experts": (
            lambda: run(grouped_gemm.grouped_matmul, (m, n), *a, *b, offsets), list(dense[0].split(counts)), list(dense[1]),
        ),
        "product of experts into FP32": (
            lambda: run(grouped_gemm.grouped_accumulate, (len(counts), n, k), *by_expert[0], *by_expert[1], offsets), *parts,
        ),
    }


def product_error(result: torch.Tensor, a, b) -> tuple[str, float]:
    """The largest error in units of the sum of a result's terms' magnitudes; 1e-3 is what the tensor cores may lose."""
    if isinstance(a, list):
        pieces = result if result.ndim == 3 else result.split([len(part) for part in a])
    else:
        pieces, a, b = [result], [a], [b]
    worst = 0.0
    for piece, left, right_ in zip(pieces, a, b, strict=True):
        if piece.numel() and left.shape[1]:
            size = (left.abs() @ right_.abs().t()).clamp_min(1e-300)
            worst = max(worst, ((piece.double() - left @ right_.t()).abs() / size).max().item())
        elif piece.any():
            raise AssertionError("an expert without rows has a result")
    if not worst <= 1e-3:
        raise AssertionError(f"error {worst:.2e} of the terms' magnitudes, more than 1e-3")
    return f"error {worst:.1e} of the terms' magnitudes", worst


# Fast ------------------------------------------------------------------------------------------------------------


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


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
            beside = f", {tflops / published:.0%} of DeepGEMM's {published} on an H800" if published else ""
            return f"{tflops:.0f} TFLOPS{beside}", tflops

        report.line("products", f"{name}, {who}", work)


def chosen(name: str):
    return backend(name, DEVICE)


def backends() -> list[str]:
    return [name for name in BACKENDS if name != "emulated"]


def products(report: Report) -> None:
    for n, k, published in DENSE:
        x, weight = normal(ROWS, k, seed=0).bfloat16(), normal(n, k, seed=1).bfloat16()
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
        x, dy, weight = (normal(*s, seed=i).bfloat16() for i, s in enumerate([(rows, k), (rows, n), (EXPERTS, n, k)]))
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
    x = normal(rows, cols, seed=0).bfloat16()
    target, n, mid = torch.empty_like(x), rows * cols, cols // 2
    codes = tiles.quantize_rows(x)
    packed = e5m6.quantize_e5m6(x)
    gate, up, weight = x[:, :mid].contiguous(), x[:, mid:].contiguous(), normal(rows, 1, seed=1).flatten()
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
            raise AssertionError(f"the losses differ by up to {distance:.2%} of the first, more than 2 %: {bf16}, {fp8}")
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
