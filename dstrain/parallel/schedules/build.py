"""Pipeline schedules by name: pure functions from (ranks, micro-batches) to a list of actions per rank.

    1f1b       one forward, one backward; rank r holds at most R - r micro-batches (arXiv 2104.04473)
    zb1p       the same with a split backward: weight gradients fill the end's bubble (ZB-H1, arXiv 2401.10241)
    dualpipe   micro-batches enter at both ends; a forward and a backward run overlapped (arXiv 2412.19437 §3.2.1)
    dualpipev  DualPipe cut in the middle: each rank holds both arms of a V of 2R stages

Every layout of stages is `stages_on`; the rest of the program asks it or `Schedule.rank_of`, never a schedule's name.
"""

from dataclasses import dataclass, field

from dstrain.config.checks import SCHEDULES
from dstrain.config.errors import InputError, nearest
from dstrain.parallel.schedules.actions import Action, Schedule, Work

NAMES = SCHEDULES


def build_schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule's lists. Raises InputError with the rule and the nearest valid values where there is none."""
    check_counts(name, ranks, micro_batches)
    if name in ("1f1b", "zb1p"):
        return _one_forward_one_backward(name, ranks, micro_batches)
    return _dualpipe(ranks, micro_batches) if name == "dualpipe" else _dualpipev(ranks, micro_batches)


def stages_on(name: str, ranks: int, rank: int) -> list[int]:
    """The stages whose weights `rank` holds, ascending; all ranks' together are stages 0 … S-1."""
    if name in ("1f1b", "zb1p"):
        return [rank]
    last = ranks - 1 if name == "dualpipe" else 2 * ranks - 1
    return sorted((rank, last - rank))


def check_counts(name: str, ranks: int, micro_batches: int) -> None:
    """Raise InputError unless the schedule exists for these numbers; builds nothing.

    DualPipe's ranks come in mirrored pairs and half of its micro-batches enter at each end, so both are even; its main
    step (step 4) is there on every rank from two micro-batches per rank on. DualPipeV has one entrance and no
    mirrored ranks: its table is meaningful for any number of ranks, one included.
    """
    if name not in NAMES:
        raise InputError(f"parallel.schedule={name}: unknown schedule{nearest(name, NAMES)}")
    if ranks < 1:
        raise InputError(f"parallel.pp={ranks}: must be at least 1")
    if name == "dualpipe" and ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise InputError(f"parallel.pp={ranks}: schedule dualpipe needs an even number of ranks; nearest valid: {near}")
    least = 1 if name in ("1f1b", "zb1p") else 2 * ranks
    even = name == "dualpipe"
    if micro_batches >= least and not (even and micro_batches % 2):
        return
    rule = "at least 1 micro-batch"
    if name == "dualpipe":
        rule = f"an even number of micro-batches, at least {least} (twice the ranks)"
    elif name == "dualpipev":
        rule = f"at least {least} micro-batches (twice the ranks)"
    near = f"{micro_batches - 1} or {micro_batches + 1}" if micro_batches > least else str(least)
    raise InputError(f"{micro_batches} micro-batches a step: schedule {name} on {ranks} ranks needs {rule}; "
                     f"nearest valid: {near}")


@dataclass
class _Rank:
    """One rank's list while it grows. A rank has one or two phases: a stage and its stream of micro-batches each.

    The k-th forward of a phase is that of its k-th micro-batch, and so is the k-th backward.
    """

    phases: list[tuple[int, int]]  # stage and first micro-batch of each phase
    actions: list[Action] = field(default_factory=list)
    forwards: dict[int, int] = field(default_factory=dict)  # phase -> how many so far
    backwards: dict[int, int] = field(default_factory=dict)
    queue: list[Work] = field(default_factory=list)  # split backwards whose weight gradients are missing, oldest first

    def _next(self, phase: int, counts: dict[int, int]) -> Work:
        stage, first = self.phases[phase]
        counts[phase] = counts.get(phase, 0) + 1
        return Work(stage, first + counts[phase] - 1)

    def F(self, phase: int) -> None:
        self.actions.append(Action("F", forward=self._next(phase, self.forwards)))

    def B(self, phase: int, split: bool = False) -> None:
        work = self._next(phase, self.backwards)
        self.actions.append(Action("B", backward=work, split=split))
        if split:
            self.queue.append(work)

    def FB(self, forward: int, backward: int) -> None:
        works = self._next(forward, self.forwards), self._next(backward, self.backwards)
        self.actions.append(Action("FB", *works))

    def W(self) -> None:
        self.actions.append(Action("W", backward=self.queue.pop(0)))


def _one_forward_one_backward(name: str, ranks: int, micro_batches: int) -> Schedule:
    """1F1B, and ZB-H1: rank r lags r weight gradients behind, and works them off while 1F1B's end would be idle.

    Activations plus queued weight gradients stay within the R micro-batches of 1F1B's first rank on every rank.
    """
    actions = []
    for rank in range(ranks):
        here = _Rank([(rank, 0)])
        split = name == "zb1p"
        ahead = min(ranks - 1 - rank, micro_batches)  # forwards before the first backward's own
        for i in range(micro_batches + ahead):
            if i < micro_batches:
                here.F(0)
            if i >= ahead:
                here.B(0, split)
                if len(here.queue) > rank:
                    here.W()
        while here.queue:
            here.W()
        actions.append(here.actions)
    most_alive = [min(ranks - rank, micro_batches) for rank in range(ranks)]
    return Schedule(name, ranks, ranks, micro_batches, actions, lambda stage, micro_batch: stage, most_alive)


def _dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """Direction 0, micro-batches 0 … C/2-1: stage s on rank s. Direction 1, the others: stage s on rank R-1-s.

    Phase 0 of a rank is the direction that enters at its own end, so the second half of the ranks swaps the two.
    """
    half, last = micro_batches // 2, ranks - 1
    actions = []
    for rank in range(ranks):
        phases = [(rank, 0), (last - rank, half)]
        here = _Rank(phases if rank < ranks // 2 else phases[::-1])
        h = min(rank, last - rank)
        _eight_steps(here, h, ranks // 2, half - ranks + h + 1)
        actions.append(here.actions)

    def rank_of(stage: int, micro_batch: int) -> int:
        return stage if micro_batch < half else last - stage

    return Schedule("dualpipe", ranks, ranks, micro_batches, actions, rank_of, [ranks + 1] * ranks)


def _dualpipev(ranks: int, micro_batches: int) -> Schedule:
    """Rank r holds stages r (phase 0) and 2R-1-r (phase 1); every micro-batch goes down the V and up again."""
    last = 2 * ranks - 1
    actions = []
    for rank in range(ranks):
        here = _Rank([(rank, 0), (last - rank, 0)])
        _eight_steps(here, rank, ranks, micro_batches - 2 * ranks + rank + 1)
        actions.append(here.actions)

    def rank_of(stage: int, micro_batch: int) -> int:
        return min(stage, last - stage)

    return Schedule("dualpipev", ranks, 2 * ranks, micro_batches, actions, rank_of, [2 * ranks + 1] * ranks)


def _eight_steps(rank: _Rank, h: int, H: int, main: int) -> None:
    """DualPipe's list of a rank that is the h-th of H from its end; `main`: repetitions of step 4."""
    for _ in range(2 * (H - h - 1)):  # 1: the pipeline fills from this end
        rank.F(0)
    for _ in range(h + 1):  # 2: and from the other
        rank.F(0)
        rank.F(1)
    for _ in range(H - h - 1):  # 3: backward arrives; weight gradients wait until its gradient is on its way
        rank.B(1, split=True)
        rank.W()
        rank.F(1)
    for i in range(main):  # 4
        if i == 0 and h == H - 1:  # in the middle the two ends' streams meet: not overlapped, the bubble is smaller
            rank.F(0)
            rank.B(1)
        else:
            rank.FB(0, 1)
        rank.FB(1, 0)
    for _ in range(H - h - 1):  # 5: this end has no more forwards
        rank.B(1)
        rank.FB(1, 0)
    for i in range(h + 1):  # 6: from the middle of these on, weight gradients are kept to fill the end
        late = i > (h + 1) // 2
        now = i == (h + 1) // 2
        rank.B(1, split=late or (now and h % 2 == 1))
        rank.B(0, split=late or now)
    for _ in range(H - h - 1):  # 7
        rank.W()
        rank.B(0, split=True)
    for _ in range(h + 1):  # 8
        rank.W()
