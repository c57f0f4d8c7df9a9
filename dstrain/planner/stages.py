"""The partition onto stages that is fastest by the plan's own times, within a GPU's memory.

Training's own choice (parallel/partition.py) balances FLOPs, which knows neither that a head's products stay in BF16
nor that a pair of unequal chunks leaves communication in the open. Here the cost of a rank is the time of its pairs, or
of its stage where nothing overlaps. The largest cost of a rank is made as small as possible, then the sum of squares.
The search is exact: pieces are taken from both ends of the list of units as in parallel/partition.py. What comes out is
given to training as parallel.stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from dstrain.model.unit import Unit, list_units
from dstrain.parallel.partition import best_pieces
from dstrain.planner.holdings import Held
from dstrain.planner.job import Job
from dstrain.planner.memory import GIB, Active, alive_at_once, buffers, most_active, state_bytes
from dstrain.planner.times import StageTimes, Times

SLACK = 0.002  # costs of ranks this close count as equal
MOST = 8  # times the least possible cost of a rank: a partition that is worse is none


def fastest_stages(job: Job, times: Times, held: list[list[Held]]) -> list[int] | None:
    """Units of every stage; None where no partition fits."""
    search = _Search(job, times, held)
    best, limit = None, search.least
    while best is None and limit < MOST * search.least:  # a tight limit leaves few states; it only has to be met
        limit *= 1.06
        best = search.run(limit, lambda value, cost: max(value, cost))
    if best is None:
        return None
    return search.run(best[0] * (1 + SLACK), lambda value, cost: value + cost**2)[1]


@dataclass(frozen=True)
class _Piece:
    """Consecutive units: their times, and what they need of a micro-batch."""

    times: StageTimes
    kind: tuple  # equal kinds have equal times
    active: Active


class _Search:
    def __init__(self, job: Job, times: Times, held: list[list[Held]]):
        self.job, self.times, self.units = job, times, list_units(job.config.model)
        self.n, self.arms = len(self.units), len(job.layout.partition.stages_on[0])
        self.groups = len(job.layout.partition.stages) // self.arms
        self.overlap = self.arms == 2 and job.config.parallel.overlap
        self.alive = alive_at_once(job)
        self.room = job.cluster.memory_gib * GIB - buffers(job)
        own, self.tables = _unit_bytes(job, self.units, held)
        self.sums = [0, *accumulate(own)]
        self.mtp = [0, *accumulate(unit.kind == "mtp" for unit in self.units)]
        self.places = self.units.index(Unit("embed")), self.units.index(Unit("head"))
        whole = times.stage(self.units)
        self.least = sum(block.sum("FBW", False) for block in whole.blocks) + sum(whole.extra.values())
        self.least /= self.groups
        self._pieces: dict[tuple[int, int], _Piece] = {}
        self._costs: dict[tuple, float] = {}

    def run(self, limit: float, add: Callable[[float, float], float]) -> tuple[float, list[int]] | None:
        """The least value of a partition whose ranks cost at most `limit` each, and its units per stage."""

        def steps(group: int, i: int, j: int):
            return self._steps(group, i, j, (self.groups - 1 - group) * self.arms, limit)

        return best_pieces(self.n, self.groups, self.arms, steps, add)

    def _steps(self, group: int, i: int, j: int, left: int, limit: float):
        """Every way for a group to take its pieces from units i … j-1: the new middle and the rank's cost.

        A longer piece costs more and needs more memory, so the loops end at the limit.
        """
        for i_end in range(i + 1, j - left - self.arms + 2):
            if self._cost(group, i, i_end, j, j) > limit:
                return
            for start in range(j - 1, i_end + left - 1, -1) if self.arms == 2 else (j,):
                cost = self._cost(group, i, i_end, start, j)
                if cost > limit:
                    break
                if left or start == i_end:
                    yield (i_end, start), cost

    def _cost(self, group: int, i: int, i_end: int, j: int, j_end: int) -> float:
        """Seconds of a rank's part of a micro-batch; infinite where it does not fit."""
        first, second = self._piece(i, i_end), self._piece(j, j_end)  # the second is empty where a rank has one stage
        state = self.sums[i_end] - self.sums[i] + self.sums[j_end] - self.sums[j]
        if self.mtp[i_end] > self.mtp[i] or self.mtp[j_end] > self.mtp[j]:  # it needs both tables
            for place, table in zip(self.places, self.tables, strict=True):
                state += 0 if i <= place < i_end or j <= place < j_end else table
        pieces = [first.active, second.active][: self.arms]
        if state + most_active(self.alive[group], pieces) > self.room:
            return float("inf")
        key = first.kind, second.kind
        if key not in self._costs:
            a, b = first.times, second.times
            self._costs[key] = (self.times.pair(a, b).seconds + self.times.pair(b, a).seconds if self.overlap
                                else a.alone("FBW") + b.alone("FBW"))
        return self._costs[key]

    def _piece(self, first: int, end: int) -> _Piece:
        if (first, end) not in self._pieces:
            units, dense = self.units[first:end], self.job.config.model.first_k_dense_replace
            kind = tuple(sorted((u.kind, u.kind == "block" and u.index < dense) for u in units))
            self._pieces[first, end] = _Piece(self.times.stage(units), kind, Active.of(self.job, units))
        return self._pieces[first, end]


def _unit_bytes(job: Job, units: list[Unit], held: list[list[Held]]) -> tuple[list[float], tuple[float, float]]:
    """Weights, gradients and optimizer of every unit of its own; and of embedding and projection."""
    found: dict[str, float] = {}
    for of_rank in held:
        groups: dict[str, list[Held]] = {}
        for one in of_rank:
            key = one.name.split(".")[2] if one.name.startswith("model.layers.") else one.name
            groups.setdefault(key, []).append(one)
        for key, group in groups.items():
            found[key] = max(found.get(key, 0), sum(state_bytes(job, group)))
    tables = found["model.embed_tokens.weight"], found["lm_head.weight"]
    layers = [unit.layer(job.config.model) for unit in units]
    return [found[str(layer)] if layer is not None else tables[unit.kind == "head"]
            for unit, layer in zip(units, layers, strict=True)], tables
