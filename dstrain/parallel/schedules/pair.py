"""The order inside an overlapped pair: which phases of a micro-batch's forward run between which of another's backward.

As the published trace issues them, layer by layer:

    combine(B) · attn(F) · mlp(B) · dispatch(F) · dispatch(B) · mlp(W) · mlp(F) · attn(B) · attn(W) · combine(F)

Computation and communication are two streams, each runs its operations in the order of issue, so every communication
has the computation next to it to hide behind. The executor issues this order and the planner prices it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a block (dstrain/model/block.py), forward F, backward B, or its weight gradients W."""

    name: str  # attention | dispatch | experts | combine
    part: str  # F | B | W

    @property
    def communicates(self) -> bool:
        return self.name in ("dispatch", "combine")

    def __str__(self) -> str:
        return f"{self.name}({self.part})"


@dataclass(frozen=True)
class Operation:
    """A phase of the `place`-th layer in its chunk's own order: a forward counts up from 0, a backward down from the top."""

    phase: Phase
    place: int

    def __str__(self) -> str:
        return f"{self.phase} of layer {self.place}"


ORDER = tuple(Phase(name, part) for name, part in (
    ("combine", "B"), ("attention", "F"), ("experts", "B"), ("dispatch", "F"), ("dispatch", "B"),
    ("experts", "W"), ("experts", "F"), ("attention", "B"), ("attention", "W"), ("combine", "F"),
))

# What each phase works on; the first of a chunk's next layer works on what the last of this layer gives.
_FORWARD = ("attention", "dispatch", "experts", "combine")
_BACKWARD = _FORWARD[::-1]


def pair_order(forward_layers: int, backward_layers: int, order: Iterable[Phase] = ORDER) -> list[Operation]:
    """The two chunks zipped layer by layer from their starts; the longer one's tail runs alone, in its own order."""
    order = tuple(order)
    layers = {"F": forward_layers, "B": backward_layers, "W": backward_layers}
    return [Operation(phase, place) for place in range(max(forward_layers, backward_layers))
            for phase in order if place < layers[phase.part]]


def taken_by(operation: Operation) -> Operation | None:
    """The operation whose result this one takes; None: the chunk's own input."""
    name, part = operation.phase.name, operation.phase.part
    if part == "W":
        return Operation(Phase(name, "B"), operation.place)
    chain = _FORWARD if part == "F" else _BACKWARD
    i = chain.index(name)
    if i > 0:
        return Operation(Phase(chain[i - 1], part), operation.place)
    return Operation(Phase(chain[-1], part), operation.place - 1) if operation.place > 0 else None


@dataclass(frozen=True)
class PairTimeline:
    start: dict[Operation, float]
    end: dict[Operation, float]

    @property
    def span(self) -> float:
        return max(self.end.values(), default=0)

    def busy(self, communication: bool) -> float:
        return sum(self.end[op] - self.start[op] for op in self.start if op.phase.communicates == communication)

    @property
    def hidden_fraction(self) -> float:
        """The share of communication time in which computation ran too; 1 where there is no communication."""
        of = {flag: [(self.start[op], self.end[op]) for op in self.start if op.phase.communicates == flag]
              for flag in (True, False)}
        both = sum(max(0.0, min(e, f) - max(s, g)) for s, e in of[True] for g, f in of[False])
        return both / self.busy(True) if self.busy(True) else 1.0


def simulate_pair(
    operations: Iterable[Operation], time_of: Callable[[Operation], float], overlap: bool = True
) -> PairTimeline:
    """Run operations in the order of issue; each starts once its stream is free and what it takes is there.

    time_of: its duration, in any unit. overlap=False: one stream for both kinds, so the span is the sum. Raises
    ValueError where an operation is issued before the one it takes from.
    """
    free: dict[bool, float] = {}
    start: dict[Operation, float] = {}
    end: dict[Operation, float] = {}
    for operation in operations:
        stream = operation.phase.communicates and overlap
        taken = taken_by(operation)
        if taken is not None and taken not in end:
            raise ValueError(f"{operation} is issued before {taken}")
        start[operation] = max(free.get(stream, 0), end[taken] if taken is not None else 0)
        free[stream] = end[operation] = start[operation] + time_of(operation)
    return PairTimeline(start, end)
