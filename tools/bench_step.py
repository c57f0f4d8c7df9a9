"""One training step beside other implementations of the same model: time, memory, share of the GEMM rate.

    python tools/bench_step.py                              # bench_81m, fp32 and bf16, beside the peers that import
    python tools/bench_step.py model=small precisions=bf16 peers=none mtp=0,1,4
    python tools/bench_step.py rounds=9 threads=2 out=tools/results/step.md

Every contestant is a process of its own with the same allocator settings, on the same random batch, doing the same
work: forward, backward, global-norm clip, AdamW. Steps are interleaved round by round, so that a disturbance of the
machine meets all of them, and medians are compared. A peer is run in each of its settings for two steps first, and
only the fastest takes part. Peers hold their weights in the precision itself; dstrain's bf16 keeps FP32 masters.
"""

import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

DEFAULTS = {
    "model": "bench_81m", "sequence": "512", "batch": "4", "precisions": "fp32,bf16", "peers": "transformers,torchtitan",
    "mtp": "0", "rounds": "7", "threads": "2", "compile": "true", "out": "", "timeout": "900",
}
# Returning freed blocks to the kernel costs every contestant a lot; all get the same settings.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}


def main() -> None:
    options = DEFAULTS | dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}")
    os.environ |= ALLOCATOR | {"OMP_NUM_THREADS": options["threads"]}
    rows = [row for precision in options["precisions"].split(",") for row in compare(options, precision)]
    text = table(options, rows)
    print(text)
    summary = summarise(rows)
    if options["out"]:
        Path(options["out"]).write_text(f"{text}\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))


def compare(options: dict, precision: str) -> list[dict]:
    """Interleaved medians of every contestant in one precision."""
    specs = [{"who": "dstrain", "mtp": int(depth)} for depth in options["mtp"].split(",")]
    specs += [{"who": peer} for peer in options["peers"].split(",") if peer != "none"]
    contestants = []
    for spec in specs:  # one after the other: each chooses its setting on a quiet machine
        contestant = Contestant(spec, options, precision)
        if contestant.ready():
            contestants.append(contestant)
    for number in range(int(options["rounds"])):
        for contestant in contestants:
            contestant.step()
        print(f"{precision} round {number + 1}: " + "  ".join(f"{c.name} {c.seconds[-1]:.2f} s" for c in contestants),
              file=sys.stderr)
    return [contestant.finish() for contestant in contestants]


class Contestant:
    """A process that makes one step whenever it is asked."""

    def __init__(self, spec: dict, options: dict, precision: str):
        self.name = spec["who"] + (f" mtp {spec['mtp']}" if spec.get("mtp") else "")
        self.precision, self.timeout, self.seconds, self.gemm = precision, float(options["timeout"]), [], []
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, spec, options, precision), daemon=True)
        self.process.start()

    def receive(self) -> dict:
        if not self.pipe.poll(self.timeout):
            sys.exit(f"{self.name} {self.precision}: no answer within {self.timeout:.0f} s")
        return self.pipe.recv()

    def ready(self) -> bool:
        self.facts = self.receive()
        if "missing" in self.facts:
            print(f"{self.name}: left out, {self.facts['missing']}", file=sys.stderr)
            return False
        print(f"{self.name} {self.precision}: {self.facts['setting']}", file=sys.stderr)
        return True

    def step(self) -> None:
        self.pipe.send("step")
        answer = self.receive()
        self.seconds.append(answer["seconds"])
        self.gemm.append(answer["gemm"])

    def finish(self) -> dict:
        self.pipe.send("end")
        peak = self.receive()["peak_gib"]
        self.process.join(10)
        median = statistics.median(self.seconds)
        return {
            "who": self.name, "precision": self.precision, "setting": self.facts["setting"], "seconds": median,
            "tokens_per_second": self.facts["tokens"] / median, "peak_gib": peak, "gflop": self.facts["gflop"],
            "gemm_share": self.facts["gflop"] / median / statistics.median(self.gemm), "all_seconds": self.seconds,
        }


def work(pipe, spec: dict, options: dict, precision: str) -> None:
    """The process of one contestant."""
    import torch

    torch.set_num_threads(int(options["threads"]))
    torch.manual_seed(0)
    from dstrain.config.compose import compose
    from dstrain.model.count import flops_per_token

    depth = spec.get("mtp", 0)
    overrides = [
        f"model={options['model']}", f"data.sequence_length={options['sequence']}", f"batch.sequences={options['batch']}",
        f"batch.micro_sequences={options['batch']}", f"model.num_nextn_predict_layers={depth}",
        "model.mtp_depth_weights=null", f"precision={precision}",
    ]
    config = compose("train", overrides)[0]
    sequence, batch = int(options["sequence"]), int(options["batch"])
    tokens = torch.randint(0, config.model.vocab_size, (batch, sequence + 1 + depth))
    try:
        if spec["who"] == "dstrain":
            setting, step = ours(config, tokens, precision, options["compile"] == "true")
        else:
            import bench_peers

            setting, step = bench_peers.fastest(spec["who"], config.model, tokens, precision)
    except ImportError as error:
        pipe.send({"missing": f"it does not import here ({error})"})
        return
    gflop = flops_per_token(config.model, sequence) * batch * sequence / 1e9
    pipe.send({"setting": setting, "tokens": batch * sequence, "gflop": gflop})
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    a = torch.ones(1024, 1024, dtype=dtype)
    while pipe.recv() == "step":
        begin = time.perf_counter()
        step()
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(4):
            a @ a
        pipe.send({"seconds": seconds, "gemm": 4 * 2 * 1024**3 / (time.perf_counter() - begin) / 1e9})
    pipe.send({"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20})


def ours(config, tokens, precision: str, compiled: bool):
    """dstrain's own step, as the trainer runs it, on a stream that always gives `tokens`."""
    import torch

    from dstrain.parallel.dispatch import LocalDispatcher, row_alignment
    from dstrain.precision.pointwise import compile_kernels
    from dstrain.precision.policy import resolve_precision
    from dstrain.train.state import RunState, build_state, initialise
    from dstrain.train.step import Stepper

    if compiled:
        compile_kernels()
    chosen = resolve_precision(precision, torch.device("cpu"))
    model, optimizer = build_state(config, chosen, torch.device("cpu"))
    initialise(model, optimizer, seed=0)
    stream = type("Stream", (), {"batch": lambda self, first, count: (tokens, torch.zeros_like(tokens))})()
    dispatcher = LocalDispatcher(row_alignment(model.device, chosen.compute))
    stepper, state = Stepper(config, model, optimizer, dispatcher, stream), RunState()
    for _ in range(2):
        stepper.step(state)
    return f"moments {config.optim.moments}, compile {str(compiled).lower()}", lambda: stepper.step(state)


def table(options: dict, rows: list[dict]) -> str:
    lines = [
        f"model {options['model']}, {options['batch']} x {options['sequence']} tokens, {options['threads']} threads; "
        f"{cpu_name()}, torch {version('torch')}, {date.today()}; medians of {options['rounds']} interleaved rounds",
        "",
        "| precision | who | setting | s per step | tokens/s | peak GiB | share of GEMM rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['precision']} | {row['who']} | {row['setting']} | {row['seconds']:.3f} | {row['tokens_per_second']:,.0f} "
            f"| {row['peak_gib']:.2f} | {row['gemm_share']:.0%} |"
        )
    return "\n".join(lines)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def summarise(rows: list[dict]) -> dict:
    """Ratios against the better peer: how many times as fast, and our share of its memory; MTP's time per FLOP."""
    summary = {"rows": rows}
    for precision in dict.fromkeys(row["precision"] for row in rows):
        of = [row for row in rows if row["precision"] == precision]
        own = [row for row in of if row["who"].startswith("dstrain")]
        peers = [row for row in of if not row["who"].startswith("dstrain")]
        if own and peers:
            best = min(peers, key=lambda row: row["seconds"])
            summary[f"ratio_{precision}"] = best["seconds"] / own[0]["seconds"]
            summary[f"memory_ratio_{precision}"] = own[0]["peak_gib"] / min(row["peak_gib"] for row in peers)
        for row in own[1:]:
            per_flop = (row["seconds"] / row["gflop"]) / (own[0]["seconds"] / own[0]["gflop"])
            summary[f"time_per_flop_{precision}_{row['who'].split()[-1]}"] = per_flop
    memory = [value for key, value in summary.items() if key.startswith("memory_ratio_")]
    if memory:
        summary["memory_ratio"] = max(memory)
    return summary


if __name__ == "__main__":
    main()
