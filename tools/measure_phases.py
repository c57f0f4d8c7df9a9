"""Phase times of training on the machine at hand, as a file for `dstrain plan phases=FILE`.

    python tools/measure_phases.py out=mine.yaml ranks=4 cluster=cpu_2cores model=small parallel.ep=4 run.device=cpu
    torchrun … tools/measure_phases.py out=mine.yaml cluster=h100 recipe=deepseek_v3 …

Takes the overrides of `dstrain plan`, which say how the run is laid out on the ranks. `ranks=N` starts N processes here;
under torchrun or Slurm they are there already. `steps=N` optimizer steps are measured (default 5) after two to warm up,
on random tokens. Written are medians over the steps and ranks of a phase's time per MoE layer and micro-batch. A phase's
time is its own: what it waits for a communication counts for that communication, its weight gradients for W. On a GPU
the device is waited for around every phase, so nothing overlaps and steps are slower than in training.

The last line is JSON: the measured step, and the step that a plan predicts from the file.
"""

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml

from dstrain.config.compose import compose
from dstrain.model import passes
from dstrain.model.block import BlockPass
from dstrain.parallel.device import pick_device
from dstrain.parallel.group import Started
from dstrain.parallel.layout import Layout
from dstrain.parallel.transfer import Transfer
from dstrain.parallel.world import World
from dstrain.parallel.zero import GradientReduction
from dstrain.planner.job import Job
from dstrain.planner.measured import NAMES, load_factors
from dstrain.planner.plan import Plan
from dstrain.planner.times import Times
from dstrain.precision import fp8_linear, linear
from dstrain.precision.policy import resolve_precision
from dstrain.train.optimizer import AdamW
from dstrain.train.state import RunState, build_state, initialise
from dstrain.train.step import Stepper

WARM_UP = 2
STEP_NAMES = ("reduce", "gather", "optimizer")  # of a whole step
PHASES = {"attention": "attention F", "dispatch": "dispatch F", "experts": "experts F", "combine": "combine F",
          "output": "combine F", "combine_backward": "combine B", "experts_backward": "experts B",
          "dispatch_backward": "dispatch B", "attention_backward": "attention B"}
WAITED = {"experts": "dispatch F", "output": "combine F", "experts_backward": "combine B",
          "attention_backward": "dispatch B"}


class Clock:
    """Seconds by name, each name's own: what is timed inside is taken off."""

    def __init__(self, device: torch.device):
        self.device, self.seconds, self.passes, self.open = device, Counter(), Counter(), []

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, name: str, function, *arguments):
        begin = self.now()
        if self.open:
            self.seconds[self.open[-1][0]] += begin - self.open[-1][1]
        self.open.append([name, begin])
        try:
            return function(*arguments)
        finally:
            end = self.now()
            self.seconds[name] += end - self.open.pop()[1]
            if self.open:
                self.open[-1][1] = end


def mark(clock: Clock) -> None:
    """Time every phase of the training code."""
    for method, name in PHASES.items():
        setattr(BlockPass, method, _phase(clock, method, name, getattr(BlockPass, method)))
    wait = BlockPass._wait
    BlockPass._wait = lambda one: clock.timed(WAITED[one.method], wait, one)
    for owner, name in ((passes.EmbedPass, "embed"), (passes.HeadPass, "head"), (passes.MergePass, "merge")):
        for method, part in (("forward", "F"), ("backward", "B")):
            setattr(owner, method, _counted(clock, f"{name} {part}", getattr(owner, method)))
    for module in (linear, fp8_linear):
        later = module.now_or_deferred
        module.now_or_deferred = lambda closure, later=later: later(_weights(clock, closure))
    for owner, method, name in ((GradientReduction, "finish", "reduce"), (AdamW, "step", "optimizer"),
                                (AdamW, "grad_norm", "optimizer"), (Transfer, "receive", "waiting"),
                                (Transfer, "finish", "waiting")):
        setattr(owner, method, _whole(clock, name, getattr(owner, method)))
    started = Started.wait

    def gathered(one):
        inside = clock.open and clock.open[-1][0] == "optimizer"
        return clock.timed("gather", started, one) if inside else started(one)

    Started.wait = gathered


def _phase(clock: Clock, method: str, name: str, function):
    def call(one, *arguments):
        one.method = method
        kind = name if one.block.is_moe else f"dense {name}"
        clock.passes[kind] += method != "output"
        return clock.timed(kind, function, one, *arguments)

    return call


def _counted(clock: Clock, name: str, function):
    def call(*arguments):
        clock.passes[name] += 1
        return clock.timed(name, function, *arguments)

    return call


def _whole(clock: Clock, name: str, function):
    return lambda *arguments: clock.timed(name, function, *arguments)


def _weights(clock: Clock, closure):
    """A weight gradient belongs to the phase in whose backward it arises: attention B -> attention W."""
    name = clock.open[-1][0][:-1] + "W"
    return lambda: clock.timed(name, closure)


def measure(overrides: list[str], steps: int) -> tuple[dict[str, float], float] | None:
    """As one rank. -> on rank 0 the medians in milliseconds by name and the median seconds of a step, else None."""
    config = compose("plan", overrides)[0]
    world = World.start()
    device = world.device(pick_device(config.run.device))
    if device.type == "cpu":
        torch.set_num_threads(config.run.threads or 1)
    precision = resolve_precision(config.precision.name, device, config.precision.backend, config.precision.scales)
    config = Job.of(config).config
    layout = Layout(config, world.size, world.rank, world.local_size)
    layout.connect(device)
    clock = Clock(device)
    mark(clock)
    model, optimizer = build_state(config, precision, device, layout.replicas)
    initialise(model, optimizer, config.run.seed)
    dispatcher = layout.dispatcher(device, precision.compute)
    stepper = Stepper(config, model, optimizer, dispatcher, RandomTokens(config), layout)
    state, rows, seconds = RunState(), [], []
    for step in range(WARM_UP + steps):
        clock.seconds.clear()
        clock.passes.clear()
        seconds.append(stepper.step(state)["step_time"])
        if step >= WARM_UP:
            rows.append({name: 1e3 * clock.seconds[name] / (clock.passes[_passes(name)] or 1)
                         for name in NAMES if name in clock.seconds})
    everyone = layout.mesh.host_group.gather_objects((rows, seconds[WARM_UP:]), "phase times")
    world.end()
    if not world.is_first:
        return None
    every = [row for of_rank, _ in everyone for row in of_rank]
    medians = {name: statistics.median(row[name] for row in every if name in row)
               for name in NAMES if any(name in row for row in every)}
    return medians, statistics.median(max(times) for times in zip(*(times for _, times in everyone)))


def _passes(name: str) -> str:
    """What a phase's time is divided by: the passes of its backward, where it is W; a step's own by nothing."""
    return name[:-1] + "B" if name.endswith("W") else name


class RandomTokens:
    def __init__(self, config):
        self.vocab = config.model.vocab_size
        self.width = config.data.sequence_length + 1 + config.model.num_nextn_predict_layers

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, self.vocab, (count, self.width), generator=torch.Generator().manual_seed(first))
        return tokens, torch.zeros_like(tokens)


def _rank(rank: int, ranks: int, port: int, overrides: list[str], steps: int, pipe) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = measure(overrides, steps)
    if rank == 0:
        pipe.send(found)


def start_ranks(ranks: int, overrides: list[str], steps: int) -> tuple[dict[str, float], float]:
    """Processes on this machine; rank 0's result. Ends all of them where one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=_rank, args=(rank, ranks, port, overrides, steps, sender))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        while not receiver.poll(0.5):
            if any(process.exitcode for process in processes):
                sys.exit("a rank has failed, see above")
        return receiver.recv()
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def main() -> None:
    own = {"out": "", "ranks": "1", "steps": "5"}
    own |= dict(argument.split("=", 1) for argument in sys.argv[1:] if argument.split("=", 1)[0] in own)
    overrides = [argument for argument in sys.argv[1:] if argument.split("=", 1)[0] not in own]
    ranks, steps = int(own["ranks"]), int(own["steps"])
    if not own["out"]:
        sys.exit("give out=FILE.yaml")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        found = measure(overrides, steps)
    else:
        overrides.append(f"cluster.gpus={ranks}")
        found = start_ranks(ranks, overrides, steps)
    if found is None:
        return
    medians, seconds = found
    text = yaml.safe_dump({"about": f"tools/measure_phases.py, {steps} steps", "run": overrides,
                           "milliseconds": {name: round(value, 4) for name, value in medians.items()}}, sort_keys=False)
    Path(own["out"]).write_text(text, encoding="utf-8")
    print(text)
    config = compose("plan", [*overrides, f"phases={Path(own['out']).resolve()}"])[0]
    job = Job.of(config)
    plan = Plan.of(job, Times(job, load_factors(config.phases)))
    print(json.dumps({"measured_step_s": seconds, "predicted_step_s": plan.step.seconds,
                      "ratio": plan.step.seconds / seconds, "parts": plan.step.parts}))


if __name__ == "__main__":
    main()
