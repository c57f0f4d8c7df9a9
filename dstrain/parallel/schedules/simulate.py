"""When every action of a schedule runs: lists are executed in order, an action starts when what it needs has arrived."""

from dataclasses import dataclass

from dstrain.parallel.schedules.actions import Action, Schedule
from dstrain.parallel.schedules.messages import before


@dataclass(frozen=True)
class Durations:
    """In any one unit of time. The default is the published bubbles' unit: a forward, half a backward."""

    F: float = 1
    B: float = 2  # input and weight gradients
    W: float = 1  # a split backward takes B - W, its W action W
    FB: float = 3  # an overlapped pair
    transfer: float = 0  # of a state or gradient between two ranks, beside the computation

    def of(self, action: Action) -> float:
        return self.B - self.W if action.split else getattr(self, action.kind)


@dataclass(frozen=True)
class Timeline:
    start: list[list[float]]  # [rank][position in its list]
    end: list[list[float]]
    makespan: float  # until the last action of all ranks has ended

    def idle(self) -> list[float]:
        """By rank: the time within the makespan in which it computes nothing."""
        return [self.makespan - sum(e - s for s, e in zip(starts, ends, strict=True))
                for starts, ends in zip(self.start, self.end, strict=True)]


def simulate(schedule: Schedule, durations: Durations = Durations()) -> Timeline:
    """Start and end of every action. Raises ValueError where no rank can go on."""
    ranks = range(schedule.ranks)
    start: list[list[float]] = [[] for _ in ranks]
    end: list[list[float]] = [[] for _ in ranks]
    done: dict[tuple, tuple[int, float]] = {}  # ("F" or "B", work) -> its rank and when its result is there
    moving = True
    while moving:
        moving = False
        for rank in ranks:
            actions = schedule.actions[rank]
            while len(end[rank]) < len(actions):
                action = actions[len(end[rank])]
                needed = [done.get(key) for key in before(schedule, action)]
                if None in needed:
                    break
                free = end[rank][-1] if end[rank] else 0
                begin = max([free, *(t + durations.transfer * (other != rank) for other, t in needed)])
                start[rank].append(begin)
                end[rank].append(begin + durations.of(action))
                if action.forward is not None:
                    done["F", action.forward] = rank, end[rank][-1]
                if action.kind in ("B", "FB"):
                    done["B", action.backward] = rank, end[rank][-1]
                moving = True
    stuck = [f"rank {rank} before {schedule.actions[rank][len(end[rank])]}"
             for rank in ranks if len(end[rank]) < len(schedule.actions[rank])]
    if stuck:
        raise ValueError(f"schedule {schedule.name}: deadlock, waiting for ever: {'; '.join(stuck)}")
    return Timeline(start, end, max(ends[-1] for ends in end if ends))


FORMULAS = {
    "1f1b": "(pp - 1)(F + B)",
    "zb1p": "(pp - 1)(F + B - 2W)",
    "dualpipe": "(pp/2 - 1)(F&B + B - 3W)",
    "dualpipev": "(pp - 1)(F&B + B - 3W)",
}


def bubble(name: str, ranks: int, durations: Durations = Durations()) -> float:
    """Idle time of a rank by the published formulas (arXiv 2412.19437, table 2, and DualPipe's repository).

    DualPipeV's is published over its stages, of which it has two a rank. ZB1P's holds from as many micro-batches as
    ranks on, DualPipe's wherever the schedule exists.
    """
    d = durations
    return {
        "1f1b": (ranks - 1) * (d.F + d.B),
        "zb1p": (ranks - 1) * (d.F + d.B - 2 * d.W),
        "dualpipe": (ranks / 2 - 1) * (d.FB + d.B - 3 * d.W),
        "dualpipev": (ranks - 1) * (d.FB + d.B - 3 * d.W),
    }[name]
