"""A pipeline schedule as data: for every rank the list of what it does, in order.

Nothing here runs anything. The executor runs a list, the planner prices it, the drawing shows it, the check proves it.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One micro-batch through one stage, forward or backward."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class Action:
    """F: `forward`. B: `backward`. FB: both, overlapped. W: the weight gradients that a split backward has left.

    W names in `backward` the work whose weight gradients it computes: the oldest in the rank's queue.
    """

    kind: str  # F | B | FB | W
    forward: Work | None = None
    backward: Work | None = None
    split: bool = False  # B: leave the weight gradients in the queue

    def __str__(self) -> str:
        works = " and ".join(str(work) for work in (self.forward, self.backward) if work is not None)
        return f"{self.kind}{' (split)' if self.split else ''} of {works}"


@dataclass(frozen=True)
class Schedule:
    """The lists of all ranks. Stages count from the embedding; micro-batches 0 … micro_batches - 1."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    actions: list[list[Action]]  # by rank
    rank_of: Callable[[int, int], int]  # (stage, micro_batch) -> the rank that runs it
    most_alive: list[int]  # by rank: micro-batches whose activations are held at once, at most (counted per stage)

    def stages_of(self, rank: int) -> list[int]:
        """The stages whose weights `rank` holds, ascending."""
        return sorted({w.stage for a in self.actions[rank] for w in (a.forward, a.backward) if w is not None})
