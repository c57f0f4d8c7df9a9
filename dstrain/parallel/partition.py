"""Which units of the model each pipeline stage runs.

Stages are contiguous pieces of the list of units (model/unit.py). A rank runs all its stages in every step, so the
slowest *rank* sets the pace: its cost is made as small as possible, then the largest cost of a stage, then the sum of
the stages' squared costs, which spreads what is left evenly. The cost of a unit is its FLOPs per token.

Where a rank has two stages, rank costs within TOLERANCE of the least count as equal: FLOPs tell time no better, and
for the last percent the search would pair a stage of 31 blocks with one of 3, whose overlapped chunks leave most
communication in the open.

The search is exact. Where a rank has two stages, these are the g-th from the front and the g-th from the back, so the
pieces are taken from both ends at once: a state is what is left in the middle, units i … j-1.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from dstrain.config.errors import InputError
from dstrain.config.schema import ModelConfig
from dstrain.model.count import unit_flops, unit_parameters
from dstrain.model.unit import Unit, list_units
from dstrain.parallel.schedules.build import stages_on

TOLERANCE = 0.02


@dataclass(frozen=True)
class Partition:
    stages: list[list[Unit]]
    stages_on: list[list[int]]  # by rank: the stages it runs
    flops: list[float]  # by stage: per trained token, forward and backward
    parameters: list[int]  # by stage: its units' own, on one expert-parallel rank
    rank_parameters: list[int]  # by rank: of all its stages, with the copies of embedding and head it needs

    def stages_with_embedding(self) -> list[int]:
        """Stages that look tokens up: the first, and those of MTP units."""
        return [s for s, units in enumerate(self.stages) if any(unit.kind in ("embed", "mtp") for unit in units)]

    def stages_with_head(self) -> list[int]:
        """Stages that project onto the vocabulary: the main head's, and those of MTP units."""
        return [s for s, units in enumerate(self.stages) if any(unit.kind in ("head", "mtp") for unit in units)]

    def ranks_of(self, stages: list[int]) -> list[int]:
        """The ranks that run any of these stages."""
        return [rank for rank, own in enumerate(self.stages_on) if set(own) & set(stages)]

    def lines(self) -> list[str]:
        """The partition in words, for the start of a run."""
        total = sum(self.flops)
        found = []
        for stage, units in enumerate(self.stages):
            found.append(f"stage {stage} on {_ranks(self.ranks_of([stage]))}: {_names(units)}; "
                         f"{self.flops[stage] / total:.1%} of the FLOPs, {self.parameters[stage]:,} parameters")
        for name, stages in (("embedding", self.stages_with_embedding()), ("head", self.stages_with_head())):
            ranks = self.ranks_of(stages)
            kept = ", kept equal" if len(ranks) > 1 else ""
            found.append(f"{name}: used by stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}, "
                         f"one copy on {_ranks(ranks)}{kept}")
        return found


def partition(
    config: ModelConfig,
    schedule_name: str,
    ranks: int,
    sequence_length: int,
    *,
    ep: int = 1,
    counts: list[int] | None = None,
    most_parameters: int | None = None,
) -> Partition:
    """The best partition for a schedule on `ranks` pipeline ranks.

    ep: expert-parallel ranks that share the routed experts. counts: the number of units of every stage, instead of a
    search. most_parameters: no rank may hold more, copies of embedding and head included. Raises InputError where
    there are fewer units than stages, the counts do not fit, or no partition keeps the limit.
    """
    units = list_units(config)
    own = [stages_on(schedule_name, ranks, rank) for rank in range(ranks)]
    total = 1 + max(max(stages) for stages in own)
    if len(units) < total:
        raise InputError(_too_few(config, schedule_name, ranks, total, len(units)))
    costs = [unit_flops(config, unit, sequence_length) for unit in units]
    sizes = unit_parameters(config, ep)
    search = _Search(units, costs, [sizes[unit] for unit in units], config.vocab_size * config.hidden_size,
                     len(own[0]), total // len(own[0]))
    if counts is None:
        counts = search.best(most_parameters)
    elif len(counts) != total or min(counts) < 1 or sum(counts) != len(units):
        raise InputError(f"parallel.stages={counts}: schedule {schedule_name} on {ranks} ranks needs {total} numbers "
                         f"of units, each at least 1, that sum to {len(units)}; null balances them by FLOPs")
    ends = [0, *accumulate(counts)]
    stages = [units[a:b] for a, b in pairwise(ends)]
    ends.append(len(units))  # of an empty piece, where a rank has one stage
    second = [s[1] if len(s) > 1 else total for s in own]
    rank_parameters = [search.parameters(ends[s[0]], ends[s[0] + 1], ends[b], ends[b + 1])
                       for s, b in zip(own, second, strict=True)]
    if most_parameters is not None and max(rank_parameters) > most_parameters:
        raise InputError(f"parallel.stages={counts}: rank {rank_parameters.index(max(rank_parameters))} holds "
                         f"{max(rank_parameters):,} parameters, the limit is {most_parameters:,}")
    flops = [sum(unit_flops(config, unit, sequence_length) for unit in stage) for stage in stages]
    return Partition(stages, own, flops, [sum(sizes[unit] for unit in stage) for stage in stages], rank_parameters)


class _Search:
    """Exact search over contiguous pieces; a group of ranks that run the same stages takes one or two of them."""

    def __init__(self, units: list[Unit], costs: list[float], sizes: list[int], table: int, arms: int, groups: int):
        """table: parameters of the embedding, as many as of the head's projection. arms: stages of a group, 1 or 2."""
        self.n, self.arms, self.groups, self.table = len(units), arms, groups, table
        self.cost, self.size = ([0, *accumulate(values)] for values in (costs, sizes))
        self.mtp = [0, *accumulate(unit.kind == "mtp" for unit in units)]
        self.embed, self.head = units.index(Unit("embed")), units.index(Unit("head"))

    def best(self, most_parameters: float | None) -> list[int]:
        """Units per stage; see the head of this file for what is made small."""
        room = math.inf if most_parameters is None else most_parameters
        limit, found = self.cost[-1] / self.groups, None
        while found is None and limit < 2 * self.cost[-1]:  # a tight limit leaves few states; it only has to be met
            limit *= 1.05
            found = self._run(limit, math.inf, room, lambda value, a, b, size: max(value, a + b))
        if found is None:
            raise InputError(f"no partition keeps every rank within {room:,} parameters; "
                             f"the least possible is {self._least_parameters():,}")
        rank = found[0] * (1 + TOLERANCE)
        stage, _ = self._run(rank, math.inf, room, lambda value, a, b, size: max(value, a, b))
        _, counts = self._run(rank, stage, room, lambda value, a, b, size: value + a**2 + b**2)
        return counts

    def _least_parameters(self) -> int:
        limit, found = self.size[-1] / self.groups, None
        while found is None:
            limit *= 1.05
            found = self._run(math.inf, math.inf, limit, lambda value, a, b, size: max(value, size))
        return found[0]

    def parameters(self, i: int, i_end: int, j: int, j_end: int) -> int:
        """What a rank with units i … i_end-1 and j … j_end-1 holds, one copy each of embedding and head included."""
        own = self.size[i_end] - self.size[i] + self.size[j_end] - self.size[j]
        if self.mtp[i_end] == self.mtp[i] and self.mtp[j_end] == self.mtp[j]:
            return own
        missing = sum(not (i <= unit < i_end or j <= unit < j_end) for unit in (self.embed, self.head))
        return own + missing * self.table

    def _run(
        self, most_rank: float, most_stage: float, room: float, add: Callable[[float, float, float, int], float]
    ) -> tuple[float, list[int]] | None:
        """The least value of any partition within the limits, and its units per stage; None where there is none.

        add(value so far, cost of the group's first stage, of its second, parameters) -> value with this group; it
        must not fall where the value so far rises.
        """
        def steps(group: int, i: int, j: int):
            left = self.groups - 1 - group
            for middle, *costs in self._pieces(i, j, left, most_rank, most_stage, room):
                yield middle, costs

        return best_pieces(self.n, self.groups, self.arms, steps, lambda value, costs: add(value, *costs))

    def _pieces(self, i: int, j: int, left: int, most_rank: float, most_stage: float, room: float):
        """Every way for a group to take its pieces from the middle i … j-1 that the limits and `left` groups allow.

        Yields the new middle, the costs of the two pieces and the rank's parameters. All three limits can only be
        passed further by longer pieces, so the loops end there: the unit that makes a copy of embedding or head
        needless weighs at least as much as the copy.
        """
        cost = self.cost
        for i_end in range(i + 1, j + 1):
            a = cost[i_end] - cost[i]
            if a > min(most_rank, most_stage) or self.parameters(i, i_end, j, j) > room:
                return
            for start in range(j - 1, i_end - 1, -1) if self.arms == 2 else (j,):
                b = cost[j] - cost[start]
                if b > most_stage or a + b > most_rank or start - i_end < left * self.arms:
                    break
                rest, rest_size = cost[start] - cost[i_end], self.size[start] - self.size[i_end]
                if (rest > left * most_rank if left else start != i_end) or rest_size > left * room:
                    continue
                size = self.parameters(i, i_end, start, j)
                if size > room:
                    break
                yield (i_end, start), a, b, size


def best_pieces(
    n: int,
    groups: int,
    arms: int,
    steps: Callable[[int, int, int], Iterable[tuple[tuple[int, int], Any]]],
    add: Callable[[float, Any], float],
) -> tuple[float, list[int]] | None:
    """The least value of cutting n units into pieces for `groups` groups, and the units per piece; None: no way.

    Each group takes one piece (`arms` 1) or two from the ends of what is left. steps(group, i, j) gives every way to take
    them from units i … j-1: the new middle and what it costs. add(value so far, cost) must not fall where the former
    rises.
    """
    levels: list[dict] = [{(0, n): (0.0, None)}]
    for group in range(groups):
        reached: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {}
        for (i, j), (value, _) in levels[-1].items():
            for middle, cost in steps(group, i, j):
                new = add(value, cost)
                if middle not in reached or new < reached[middle][0]:
                    reached[middle] = new, (i, j)
        levels.append(reached)
    if not levels[-1]:
        return None
    state = min(levels[-1], key=lambda state: levels[-1][state][0])
    value, front, back = levels[-1][state][0], [], []
    for level in reversed(levels[1:]):
        before = level[state][1]
        front.insert(0, state[0] - before[0])
        back.append(before[1] - state[1])
        state = before
    return value, front + (back if arms == 2 else [])


def _too_few(config: ModelConfig, schedule_name: str, ranks: int, stages: int, units: int) -> str:
    step = 2 if schedule_name == "dualpipe" else 1
    most = units * ranks // stages // step * step
    return (f"parallel.pp={ranks}: schedule {schedule_name} has {stages} stages there, but model {config.name} has "
            f"only {units} units (embedding, {config.num_hidden_layers} blocks, head, {config.num_nextn_predict_layers} MTP "
            f"modules); valid: at most {most} ranks, or more layers")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _names(units: list[Unit]) -> str:
    """Units in words, runs of blocks as one: embed, blocks 0-3."""
    parts: list[str] = []
    blocks = [unit.index for unit in units if unit.kind == "block"]
    for unit in units:
        if unit.kind != "block":
            parts.append(str(unit))
        elif unit.index == blocks[0]:
            parts.append(str(unit) if len(blocks) == 1 else f"blocks {blocks[0]}-{blocks[-1]}")
    return ", ".join(parts)
