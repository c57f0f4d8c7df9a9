"""One rank of a layout, built and stepped once by the code that trains, on tensors without data."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from dstrain.config.schema import PlanConfig
from dstrain.parallel.layout import Layout
from dstrain.planner.job import Job
from dstrain.planner.rehearsal.group import Messages, Notes, fake_world
from dstrain.planner.rehearsal.ledger import Ledger, Peak
from dstrain.planner.rehearsal.loads import StatedLoads
from dstrain.precision.backends.shapes import Shapes
from dstrain.precision.policy import PRECISIONS, Precision
from dstrain.precision.stand_in import standing_for
from dstrain.train.optimizer import AdamW
from dstrain.train.state import RunState, build_state
from dstrain.train.step import Stepper

META = torch.device("meta")


@dataclass
class Rehearsed:
    """What a rank held and sent. start: while it was built; peak: in its step."""

    rank: int
    pp_rank: int
    load: float  # rows of its experts over the mean
    start: Peak
    peak: Peak
    messages: Messages
    phases: dict[str, int]  # bytes of token dispatch, as `Traffic.metrics` names them
    seconds: float  # that its rehearsal took

    @property
    def needs(self) -> int:
        """Bytes, in its step or before it."""
        return max(self.start.total, self.peak.total)


def rehearse_rank(job: Job, rank: int, load: str) -> Rehearsed:
    """job: of the batch that is rehearsed, see `short_job`. Raises what training would raise on this rank."""
    begin, config, world_size = time.monotonic(), job.config, job.layout.mesh.world_size
    layout = Layout(config, world_size, rank, job.cluster.gpus_per_node)
    mesh, ledger = layout.mesh, Ledger()
    notes = Notes(rank, job.cluster.gpus_per_node, ledger)
    nodes = max(mesh.ep // layout.ranks_per_node, 1)
    stated = StatedLoads(load, config.model, job.tokens, mesh.ep, nodes, mesh.ep_rank)
    world = fake_world(rank, world_size, notes) if world_size > 1 else nullcontext()
    with ledger, world, standing_for("cuda" if job.is_cuda else "cpu"):
        layout.connect(META)
        precision = precision_of(config, ledger)
        model, optimizer = build_state(config, precision, META, layout.replicas)
        name_kinds(ledger, model, optimizer)
        dispatcher = layout.dispatcher(META, precision.compute)
        stated.state(dispatcher)
        if job.is_cuda and mesh.ep > 1:
            dispatcher.lane = AtOnce()
        stepper = RehearsedStepper(config, model, optimizer, dispatcher, Samples(config), layout)
        start = ledger.peak
        ledger.forget_peak()
        notes.connecting = False
        state = RunState()
        stepper.step(state)
        phases = dispatcher.traffic.metrics() if mesh.ep > 1 else {}
        return Rehearsed(rank, mesh.pp_rank, stated.load, start, ledger.peak, notes.messages, phases,
                         time.monotonic() - begin)


def short_job(job: Job) -> Job:
    """The same with as few micro-batches as show all that is ever alive at once: two a pipeline rank."""
    config, dp = job.config, job.layout.mesh.dp
    count = min(job.micro_batches(config.batch.sequences), 2 * job.layout.mesh.pp)
    sequences = count * dp * config.batch.micro_sequences
    stages = [len(units) for units in job.layout.partition.stages]
    return Job.of(replace(
        config, batch=replace(config.batch, sequences=sequences, micro_batches=None, ramp=None),
        parallel=replace(config.parallel, stages=stages if job.layout.mesh.pp > 1 else None),
    ))


def precision_of(config: PlanConfig, ledger: Ledger) -> Precision:
    """As training resolves it for a GPU: auto is bf16, and FP8 runs on a GPU's backend."""
    name = "bf16" if config.precision.name == "auto" else config.precision.name
    if name != "fp8":
        return PRECISIONS[name]
    return replace(PRECISIONS["bf16"], name=name, fp8=_CountedShapes(ledger, config.precision.scales == "power_of_two"))


class _CountedShapes(Shapes):
    """Weights in E4M3 are weights."""

    def __init__(self, ledger: Ledger, power_of_two: bool):
        super().__init__(power_of_two)
        self.ledger = ledger

    def quantize_weight(self, weight):
        with self.ledger.making("weights"):
            return super().quantize_weight(weight)


def name_kinds(ledger: Ledger, model: torch.nn.Module, optimizer: AdamW) -> None:
    for bucket in optimizer.buckets:
        ledger.count_as("weights", bucket.weights)
        ledger.count_as("gradients", bucket.grads)
    for state in optimizer.states.values():
        ledger.count_as("optimizer", state.exp_avg, state.exp_avg_sq)
        if state.has_master:
            ledger.count_as("optimizer", state.master)
    ledger.count_as("weights", *model.buffers())


class Samples:
    """Tokens without values."""

    def __init__(self, config: PlanConfig):
        self.width = config.data.sequence_length + 1 + config.model.num_nextn_predict_layers

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = count, self.width
        return (torch.empty(shape, dtype=torch.int64, device=META), torch.empty(shape, dtype=torch.int64, device=META))


class RehearsedStepper(Stepper):
    """Whatever a step reads from the device is 1: every position counts, every expert has as many tokens as any other,
    loss and norm are finite."""

    def on_host(self, values: torch.Tensor) -> list:
        return torch.ones(values.shape, dtype=values.dtype).tolist()

    def traffic(self) -> dict:
        """Left for the rehearsal to read."""
        return {}


class AtOnce:
    """`dispatch_link.Lane` of a GPU without the GPU: both parts are enqueued, what they read is held until the wait."""

    def start(self, begin: Callable, finish: Callable) -> "_Held":
        return _Held(finish(begin().wait()), (begin, finish))


class _Held:
    def __init__(self, result, held: tuple):
        self.result, self.held = result, held

    @staticmethod
    def ready() -> bool:
        return True

    def wait(self):
        self.held = None
        return self.result
