"""Memory of every pipeline rank by kind, from what it holds and from its own list of actions."""

from dataclasses import dataclass
from functools import lru_cache

from dstrain.model.loss import chunk_rows
from dstrain.model.unit import Unit
from dstrain.parallel.schedules.actions import Action
from dstrain.parallel.schedules.build import build_schedule, stages_on
from dstrain.planner.activations import block_bytes, kept_bytes, waiting_bytes
from dstrain.planner.holdings import Held
from dstrain.planner.job import Job
from dstrain.planner.traffic import hidden_bytes

GIB = 2**30
Alive = tuple[tuple[int, int], ...]  # of each stage of a rank: forwards, and split backwards, whose memory is held


@dataclass(frozen=True)
class Memory:
    """Bytes. buffers: what communication has under way, and what the cluster reserves."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def gib(self) -> dict[str, float]:
        kinds = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
        return {kind: getattr(self, kind) / GIB for kind in kinds}


def memories(job: Job, held: list[list[Held]]) -> list[Memory]:
    """By pipeline rank."""
    return [Memory(*state_bytes(job, of_rank), activations(job, rank, alive), buffers(job))
            for rank, (of_rank, alive) in enumerate(zip(held, alive_at_once(job), strict=True))]


def state_bytes(job: Job, held: list[Held]) -> tuple[float, float, float]:
    """Weights, gradients, optimizer (masters and moments of the part that a rank updates)."""
    formats = job.formats
    weights = sum(one.numel * (one.itemsize + (2 * (1 + 4 / 128**2) if one.quantized else 0)) for one in held)
    optimizer = 0.0
    for one in held:
        master = formats.main if one.itemsize < formats.main else 0
        optimizer += one.numel / len(one.ranks) * (master + formats.moments)
    return weights, formats.main * sum(one.numel for one in held), optimizer


def activations(job: Job, rank: int, alive: list[Alive]) -> float:
    """The most that is alive at once along a rank's list, and what one pass works on."""
    pieces = [job.layout.partition.stages[stage] for stage in job.layout.partition.stages_on[rank]]
    return most_active(alive, [Active.of(job, units) for units in pieces])


@dataclass(frozen=True)
class Active:
    """Of consecutive units and one micro-batch, bytes: kept between forward and backward, waiting for weight gradients,
    and what one pass works on beside these, any pass and a split backward."""

    kept: float
    waiting: float
    working: float
    split: float

    @classmethod
    def of(cls, job: Job, units: list[Unit]) -> "Active":
        kept, waiting = [kept_bytes(job, unit) for unit in units], [waiting_bytes(job, unit) for unit in units]
        # A split backward leaves a unit's weight gradients waiting before it lets go of what the unit kept.
        split = max((k + w / 2 for k, w in zip(kept, waiting)), default=0)
        return cls(sum(kept), sum(waiting), working_bytes(job, units), split)


def most_active(alive: list[Alive], pieces: list[Active]) -> float:
    """The most of any of these states of a rank, whose stages are `pieces`."""
    working = max(piece.working for piece in pieces)
    split = max(working, *(piece.split for piece in pieces))
    return max(sum(f * piece.kept + w * piece.waiting for (f, w), piece in zip(one, pieces, strict=True))
               + (split if any(w for _, w in one) else working) for one in alive)


def alive_at_once(job: Job) -> list[list[Alive]]:
    """By pipeline rank: the states along its list that can need most memory.

    They are all there with twice as many micro-batches as ranks, so no more are looked at.
    """
    pp, name = job.layout.mesh.pp, job.config.parallel.schedule
    return _alive_at_once(name, pp, min(job.micro_batches(job.config.batch.sequences), 2 * pp))


@lru_cache
def _alive_at_once(name: str, ranks: int, micro_batches: int) -> list[list[Alive]]:
    schedule = build_schedule(name, ranks, micro_batches)
    return [_alive(actions, stages_on(name, ranks, rank)) for rank, actions in enumerate(schedule.actions)]


def _alive(actions: list[Action], stages: list[int]) -> list[Alive]:
    """Along a rank's list: the forwards and split backwards of each stage that are alive; the largest states."""
    forwards, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    found = set()
    for action in actions:
        if action.forward is not None:
            forwards[action.forward.stage] += 1
        found.add(tuple((forwards[s], waiting[s]) for s in stages))
        if action.kind == "W":
            waiting[action.backward.stage] -= 1
        elif action.backward is not None:
            forwards[action.backward.stage] -= 1
            waiting[action.backward.stage] += action.split
        found.add(tuple((forwards[s], waiting[s]) for s in stages))
    return [one for one in found if not any(other != one and _covers(other, one) for other in found)]


def _covers(other: Alive, one: Alive) -> bool:
    return all(a >= b for x, y in zip(other, one, strict=True) for a, b in zip(x, y, strict=True))


def working_bytes(job: Job, units: list[Unit]) -> float:
    """What one pass works on beside what is kept: a block's gradients, all of it where it is recomputed; logits."""
    model = job.config.model
    blocks = [unit for unit in units if unit.kind in ("block", "mtp")]
    again = job.config.parallel.recompute == "block"
    found = [waiting_bytes(job, unit) / 2 + (block_bytes(job, unit) if again else 0) for unit in blocks]
    if any(unit.kind in ("head", "mtp") for unit in units):  # logits and their logarithmic softmax, in at least FP32
        rows = min(chunk_rows(model.vocab_size, job.is_cuda), job.tokens)
        found.append(rows * model.vocab_size * 2 * job.formats.wide)
    return max(found, default=0)


def buffers(job: Job) -> float:
    """Sent and received rows of one dispatch and one combine, hidden states posted or on their way, the reserve."""
    hidden, parallel = hidden_bytes(job), job.config.parallel
    rows = 0.0
    if parallel.ep > 1:
        nodes = max(parallel.ep // job.layout.ranks_per_node, 1)
        crossing = min(nodes, job.config.model.topk_group) if nodes > 1 else 0
        rows = 2 * 2 * (job.rows / job.tokens + crossing) * hidden
    return rows + (4 * hidden if parallel.pp > 1 else 0) + job.cluster.reserved_gib * GIB
