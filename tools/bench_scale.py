"""How a step's time and memory grow: with experts, sequence length, layers, MTP depth and ranks.

    python tools/bench_scale.py                                    # every axis, out= writes table and pictures
    python tools/bench_scale.py axes=experts experts=16,256 rounds=5
    python tools/bench_scale.py axes=sequence clock=cpu            # on a machine that others use too
    python tools/bench_scale.py model.num_hidden_layers=4          # keys with a dot are overrides of every point

Every point is a fresh process (of a rank: one thread each) on random tokens, one step to warm up and `steps` measured:
the forward and backward of all micro-batches, and the whole step with norm and optimizer. Points of an axis take turns,
`rounds` times, so that a disturbance of the machine meets all of them; medians are reported, and the least peak of a
process's memory in its steps above what it had before the model. clock=cpu counts processor time of all threads.

    experts    `tokens` tokens in one micro-batch, top-k and all sizes fixed: activated parameters do not grow
    sequence   one sequence
    layers, mtp, ranks    `batch` sequences; for ranks at least four a rank, one by one: experts spread (ep), copies
               (dp), stages (pp)

The last line is JSON.
"""

import ctypes
import gc
import json
import os
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

from bench_step import ALLOCATOR, cpu_name
from chart import chart
from ranks import spawn

DEFAULTS = {
    "axes": "experts,sequence,layers,mtp,ranks", "experts": "16,32,64,128,256", "sequence": "512,1024,2048,4096,8192",
    "layers": "2,4,8,16", "mtp": "0,1,2,4", "ranks": "1,2,4", "layouts": "ep,dp,pp", "model": "bench_81m",
    "precision": "bf16", "tokens": "8192", "length": "512", "batch": "4", "steps": "2", "rounds": "3", "threads": "2",
    "clock": "wall", "timeout": "900", "out": "",
}
X_NAMES = {
    "experts": "routed experts", "sequence": "tokens of the sequence", "layers": "layers", "mtp": "MTP depth",
    "ranks": "ranks of one thread",
}


def main() -> None:
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    overrides = [f"{key}={value}" for key, value in arguments.items() if "." in key]
    options = DEFAULTS | {key: value for key, value in arguments.items() if "." not in key}
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}, and overrides with a dot")
    os.environ |= ALLOCATOR | {"OMP_NUM_THREADS": options["threads"]}
    axes = {axis: measure_axis(points_of(axis, options, overrides), options) for axis in options["axes"].split(",")}
    summary = summarise(axes)
    text = table(options, axes, summary)
    print(text)
    if options["out"]:
        out = Path(options["out"])
        for axis, rows in axes.items():
            for what, picture in pictures(axis, rows).items():
                out.with_name(f"{out.stem}_{axis}_{what}.svg").write_text(picture)
        out.write_text(f"{text}\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))


def points_of(axis: str, options: dict, overrides: list[str]) -> list[dict]:
    """What each point of an axis runs: series, x, overrides and ranks."""
    length, batch, tokens = (int(options[key]) for key in ("length", "batch", "tokens"))
    points, most_ranks = [], max(map(int, options["ranks"].split(",")))

    def add(x: int, *more: str, series="", ranks=1, length=length, sequences=batch, micro=0) -> None:
        tokens = length * sequences
        points.append({"axis": axis, "series": series, "x": x, "ranks": ranks, "tokens": tokens, "overrides": [
            f"model={options['model']}", f"precision={options['precision']}", f"data.sequence_length={length}",
            f"batch.sequences={sequences}", f"batch.micro_sequences={micro or sequences}", "run.device=cpu",
            "model.mtp_depth_weights=null", *overrides, *more,
        ]})

    for x in map(int, options[axis].split(",")):
        if axis == "experts":
            add(x, f"model.n_routed_experts={x}", sequences=tokens // length)
        elif axis == "sequence":
            add(x, f"model.max_position_embeddings={x}", length=x, sequences=1)
        elif axis == "layers":
            add(x, f"model.num_hidden_layers={x}")
        elif axis == "mtp":
            add(x, f"model.num_nextn_predict_layers={x}")
        else:
            keys = {"ep": [f"parallel.ep={x}"], "dp": [], "pp": [f"parallel.pp={x}", "parallel.schedule=1f1b"]}
            for layout in options["layouts"].split(","):
                chosen, sequences = keys[layout] if x > 1 else [], max(batch, 4 * most_ranks)
                add(x, *chosen, series=layout, ranks=x, sequences=sequences, micro=1)
    return points


def measure_axis(points: list[dict], options: dict) -> list[dict]:
    """Rows: a point with the medians of what its processes measured."""
    rounds: list[list[dict]] = [[] for _ in points]
    for number in range(int(options["rounds"])):
        for point, results in zip(points, rounds):
            of_ranks = spawn(measure, point["ranks"], point, options, timeout=float(options["timeout"]))
            # Ranks end a step together; what the slowest took is the step's, the fullest one's memory counts.
            worst = {key: max(result[key] for result in of_ranks) for key in of_ranks[0]}
            results.append(worst)
            print(f"{point['axis']} {point['series']} {point['x']}, round {number + 1}: forward and backward "
                  f"{worst['passes']:.2f} s, step {worst['step']:.2f} s, {worst['peak'] / 2**30:.2f} GiB",
                  file=sys.stderr)
    rows = []
    for point, results in zip(points, rounds):
        medians = {key: statistics.median(result[key] for result in results) for key in ("passes", "step")}
        rows.append({
            **{key: point[key] for key in ("series", "x", "tokens")}, **medians, "state": results[0]["state"],
            "gradients": results[0]["gradients"], "peak": min(result["peak"] for result in results),
            "all_passes": [result["passes"] for result in results],
        })
    return rows


def measure(rank: int, size: int, point: dict, options: dict) -> dict:
    """One rank of a point. Seconds are medians over the steps; bytes: of weights and gradients, and the peak of all."""
    import torch
    from helpers import RandomStream

    from dstrain.config.compose import compose
    from dstrain.parallel.layout import Layout
    from dstrain.precision.policy import resolve_precision
    from dstrain.train.state import RunState, build_state, initialise
    from dstrain.train.step import Stepper

    torch.set_num_threads(int(options["threads"]) if size == 1 and point["axis"] != "ranks" else 1)
    config, device = compose("train", point["overrides"])[0], torch.device("cpu")
    precision = resolve_precision(config.precision.name, device)
    layout = Layout(config, size, rank, local_size=size)
    layout.connect(device)
    gc.collect()
    before = memory("VmRSS")
    model, optimizer = build_state(config, precision, device, layout.replicas)
    initialise(model, optimizer, seed=0)
    forget_peak()
    dispatcher = layout.dispatcher(device, precision.compute)
    stepper = Stepper(config, model, optimizer, dispatcher, RandomStream(config, config.model.vocab_size), layout)
    state, clock = RunState(), {"wall": time.perf_counter, "cpu": time.process_time}[options["clock"]]
    passes, steps, norm = [], [], optimizer.grad_norm
    begin = 0.0

    def grad_norm():  # what ends the passes of a step
        passes.append(clock() - begin)
        return norm()

    optimizer.grad_norm = grad_norm
    for _ in range(1 + int(options["steps"])):
        begin = clock()
        stepper.step(state)
        steps.append(clock() - begin)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(bucket.grads.nbytes for bucket in optimizer.buckets)
    kept = sum(tensor.nbytes for s in optimizer.states.values() for tensor in (s.exp_avg, s.exp_avg_sq))
    kept += sum(s.master.nbytes for s in optimizer.states.values() if s.has_master)
    return {"passes": statistics.median(passes[1:]), "step": statistics.median(steps[1:]), "gradients": gradients,
            "state": weights + gradients + kept, "peak": memory("VmHWM") - before}


def memory(kind: str) -> int:
    """VmRSS: the bytes that this process has in memory; VmHWM: the most it ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def forget_peak() -> None:
    """Give what is free back to the kernel, and begin VmHWM anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def line_through(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Least squares. -> value at 0, slope, and the largest distance from the line as a share of the value."""
    xs, ys = zip(*points)
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x in xs)
    first = y_mean - slope * x_mean
    return first, slope, max(abs(y - first - slope * x) / y for x, y in points)


def summarise(axes: dict[str, list[dict]]) -> dict:
    summary: dict = {"axes": axes}
    if len(experts := axes.get("experts", [])) > 1:
        low, high = experts[0], experts[-1]
        summary |= {
            "experts": [low["x"], high["x"]], "experts_time_ratio": high["passes"] / low["passes"],
            "experts_state_ratio": high["state"] / low["state"],
        }
    if len(lengths := axes.get("sequence", [])) > 2:
        points = [(row["x"], row["peak"]) for row in lengths]
        first, slope, residual = line_through(points)
        summary |= {"sequence_bytes_per_token": slope, "sequence_bytes_fixed": first,
                    "sequence_memory_residual": residual}
    return summary


def table(options: dict, axes: dict[str, list[dict]], summary: dict) -> str:
    text = [
        f"model {options['model']}, {options['precision']}, {options['threads']} threads, clock={options['clock']}; "
        f"{cpu_name()}, torch {version('torch')}, {date.today()}; medians of {options['rounds']} interleaved rounds"
    ]
    for axis, rows in axes.items():
        text += ["", f"| {X_NAMES[axis]} | tokens | forward + backward, s | step, s "
                 "| weights, gradients, optimizer, GiB | peak above the start, GiB |", "|---|---|---|---|---|---|"]
        for row in rows:
            name = f"{row['x']} {row['series']}".strip()
            text.append(f"| {name} | {row['tokens']:,} | {row['passes']:.2f} | {row['step']:.2f} "
                        f"| {row['state'] / 2**30:.2f} | {row['peak'] / 2**30:.2f} |")
    if "experts_time_ratio" in summary:
        few, many = summary["experts"]
        text += ["", f"{many} experts take {summary['experts_time_ratio']:.2f} times the time of {few}; weights, "
                 f"gradients and optimizer are {summary['experts_state_ratio']:.1f} times as large."]
    if "sequence_memory_residual" in summary:
        text += ["", f"Memory by sequence length: {summary['sequence_bytes_fixed'] / 2**30:.2f} GiB and "
                 f"{summary['sequence_bytes_per_token'] / 2**10:,.0f} KiB a token; the line misses by at most "
                 f"{summary['sequence_memory_residual']:.1%}."]
    return "\n".join(text)


def pictures(axis: str, rows: list[dict]) -> dict[str, str]:
    """time and memory -> an SVG document."""
    names = list(dict.fromkeys(row["series"] for row in rows))

    def series(what: str, key: str, unit: float) -> dict:
        return {f"{what} {name}".strip(): [(row["x"], row[key] / unit) for row in rows if row["series"] == name]
                for name in names}

    return {
        "time": chart(f"Time by {X_NAMES[axis]}", X_NAMES[axis], "seconds",
                      series("whole step", "step", 1) | series("forward and backward", "passes", 1)),
        "memory": chart(f"Memory by {X_NAMES[axis]}", X_NAMES[axis], "GiB",
                        series("peak", "peak", 2**30) | series("weights, gradients, optimizer", "state", 2**30)),
    }


if __name__ == "__main__":
    main()
