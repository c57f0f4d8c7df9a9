"""Where a training step's time and memory go: by phase, and by operation.

    python tools/profile_step.py model=bench_81m data.sequence_length=512 batch.sequences=4 batch.micro_sequences=4
    python tools/profile_step.py model=small precision=fp32 trace=step.json

Takes the overrides of `dstrain train`; `steps=N` are profiled (default 3) after two to warm up, `trace=FILE` also writes
a Chrome trace. A phase's time is that of its calls, the phases inside it included; memory is what its operations
allocated less what they freed. The last line is JSON.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dstrain.config.compose import compose
from dstrain.model import passes
from dstrain.model.block import BlockPass
from dstrain.parallel.device import pick_device
from dstrain.parallel.dispatch import LocalDispatcher, row_alignment
from dstrain.precision.pointwise import compile_kernels
from dstrain.precision.policy import resolve_precision
from dstrain.train.optimizer import AdamW
from dstrain.train.state import RunState, build_state, initialise
from dstrain.train.step import Stepper

PHASES = {
    BlockPass: ("attention", "dispatch", "experts", "combine", "output", "combine_backward", "experts_backward",
                "dispatch_backward", "attention_backward"),
    passes.EmbedPass: ("forward", "backward"),
    passes.HeadPass: ("forward", "backward"),
    passes.MergePass: ("forward", "backward"),
    AdamW: ("grad_norm", "step"),
}


def main() -> None:
    own = {"steps": "3", "trace": ""}
    arguments = [argument for argument in sys.argv[1:] if argument.split("=", 1)[0] not in own]
    own |= dict(argument.split("=", 1) for argument in sys.argv[1:] if argument.split("=", 1)[0] in own)
    config = compose("train", arguments)[0]
    device = pick_device(config.run.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if config.run.compile:
        compile_kernels()
    precision = resolve_precision(config.precision.name, device, config.precision.backend, config.precision.scales)
    mark_phases()
    stepper = make_stepper(config, precision, device)
    state = RunState()
    for _ in range(2):
        stepper.step(state)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, profile_memory=True) as profiler:
        for _ in range(int(own["steps"])):
            with record_function("step"):
                stepper.step(state)
    if own["trace"]:
        profiler.export_chrome_trace(own["trace"])
    report(profiler, int(own["steps"]), device)


def mark_phases() -> None:
    """Give every phase a named range, so that the profiler adds up what happens inside."""
    for owner, methods in PHASES.items():
        for method in methods:
            setattr(owner, method, marked(f"{owner.__name__}.{method}", getattr(owner, method)))


def marked(name, function):
    def call(*args, **kwargs):
        with record_function(name):
            return function(*args, **kwargs)

    return call


def make_stepper(config, precision, device) -> Stepper:
    model, optimizer = build_state(config, precision, device)
    initialise(model, optimizer, config.run.seed)
    width = config.data.sequence_length + 1 + config.model.num_nextn_predict_layers
    tokens = torch.randint(0, config.model.vocab_size, (config.batch.sequences, width))
    stream = type("Stream", (), {"batch": lambda self, first, count: (tokens[:count], torch.zeros_like(tokens[:count]))})()
    return Stepper(config, model, optimizer, LocalDispatcher(row_alignment(device, precision.compute)), stream)


def report(profiler, steps: int, device: torch.device) -> None:
    events = profiler.key_averages()
    gpu = device.type == "cuda"

    def total(event):
        return (event.device_time_total if gpu else event.cpu_time_total) / steps / 1e3

    def own(event):
        return (event.self_device_time_total if gpu else event.self_cpu_time_total) / steps / 1e3

    def memory(event):
        return (event.device_memory_usage if gpu else event.cpu_memory_usage) / steps / 2**20

    names = {f"{owner.__name__}.{method}" for owner, methods in PHASES.items() for method in methods}
    phases = sorted((event for event in events if event.key in names), key=total, reverse=True)
    step = next(event for event in events if event.key == "step")
    print(f"step {total(step):.1f} ms on {device.type}, {torch.get_num_threads()} threads\n")
    print(f"{'phase':<34}{'calls':>7}{'ms':>10}{'share':>8}{'MiB kept':>11}")
    for event in phases:
        print(f"{event.key:<34}{event.count // steps:>7}{total(event):>10.1f}{total(event) / total(step):>8.0%}{memory(event):>11.1f}")
    print(f"\n{'operation':<44}{'calls':>7}{'ms':>10}{'share':>8}")
    operations = sorted((event for event in events if event.key not in names and event.key != "step"), key=own, reverse=True)
    for event in operations[:25]:
        print(f"{event.key[:43]:<44}{event.count // steps:>7}{own(event):>10.1f}{own(event) / total(step):>8.0%}")
    print(json.dumps({
        "step_ms": total(step),
        "phases_ms": {event.key: total(event) for event in phases},
        "operations_ms": {event.key: own(event) for event in operations[:25]},
    }))


if __name__ == "__main__":
    main()
