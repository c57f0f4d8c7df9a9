"""The time of one optimizer step, by part: the pipeline's lists with the times of their stages, then what follows them.

The lists are those that the executor runs. Gradients are reduced as the trainer does it: a parameter's reduce-scatter
starts behind the last action of the last stage that uses it, one after the other on the links; then the norm, AdamW on
the rank's own part, and the all-gather of the weights. A step ends with its slowest rank.
"""

from dataclasses import dataclass, field
from statistics import median_low

from dstrain.parallel.schedules.actions import Action, Schedule
from dstrain.parallel.schedules.messages import messages
from dstrain.parallel.schedules.simulate import Durations, Timeline, simulate
from dstrain.planner.holdings import Held, holdings
from dstrain.planner.job import Job
from dstrain.planner.times import PairTimes, StageTimes, Times
from dstrain.planner.traffic import Links, hidden_bytes, links_between

PARTS = ("compute", "recomputation", "exposed_communication", "bubble", "gradient_reduction", "optimizer",
         "weight_gather")


@dataclass(frozen=True)
class StageDurations(Durations):
    """Seconds of an action by the stages that it works on."""

    stages: list[StageTimes] = field(default_factory=list)
    pairs: dict[tuple[int, int], PairTimes] = field(default_factory=dict)  # (stage of F, stage of B); empty: in turns
    known: dict[tuple, float] = field(default_factory=dict)  # by kind and stages: a step has many alike

    def of(self, action: Action) -> float:
        stages = (work and work.stage for work in (action.forward, action.backward))
        key = (action.kind, action.split, *stages)
        if key not in self.known:
            self.known[key] = self._of(action)
        return self.known[key]

    def _of(self, action: Action) -> float:
        if action.kind == "FB" and self.pairs:
            return self.pairs[action.forward.stage, action.backward.stage].seconds
        seconds = self.stages[action.forward.stage].alone("F") if action.forward is not None else 0
        if action.backward is not None:
            parts = "W" if action.kind == "W" else "B" if action.split else "BW"
            seconds += self.stages[action.backward.stage].alone(parts)
        return seconds

    def exposed(self, action: Action) -> float:
        """Communication that nothing hides."""
        if action.kind == "FB" and self.pairs:
            pair = self.pairs[action.forward.stage, action.backward.stage]
            return pair.communication - pair.hidden
        sent = self.stages[action.forward.stage].communication("F") if action.forward is not None else 0
        return sent + (self.stages[action.backward.stage].communication("B")
                       if action.backward is not None and action.kind != "W" else 0)

    def again(self, action: Action) -> float:
        if action.backward is None or action.kind == "W":
            return 0
        return sum(block.again for block in self.stages[action.backward.stage].blocks)


@dataclass(frozen=True)
class Step:
    line: Timeline
    rank: int  # the pipeline rank that the parts are of: the one that is idle least
    parts: dict[str, float]  # seconds, by PARTS; together the step
    pair: PairTimes | None  # the median one of all overlapped pairs

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step_time(job: Job, times: Times, schedule: Schedule, held: list[list[Held]]) -> Step:
    stages = [times.stage(units) for units in job.layout.partition.stages]
    actions = [action for of_rank in schedule.actions for action in of_rank]
    pairs = {}
    if job.config.parallel.overlap:
        asked = {(a.forward.stage, a.backward.stage) for a in actions if a.kind == "FB"}
        pairs = {(f, b): times.pair(stages[f], stages[b]) for f, b in asked}
    durations = StageDurations(transfer=times.transfer(), stages=stages, pairs=pairs)
    line = simulate(schedule, durations)
    idle = line.idle()
    rank = idle.index(min(idle))
    own = schedule.actions[rank]
    exposed, again = sum(map(durations.exposed, own)), sum(map(durations.again, own))
    tails = [_tail(job, times, held[r], schedule.actions[r], line.end[r], line.makespan) for r in range(schedule.ranks)]
    parts = {
        "compute": line.makespan - idle[rank] - exposed - again,
        "recomputation": again,
        "exposed_communication": exposed,
        "bubble": idle[rank],
        "gradient_reduction": max(tail[0] for tail in tails),
        "optimizer": max(tail[1] for tail in tails),
        "weight_gather": max(tail[2] for tail in tails),
    }
    overlapped = sorted((durations.of(a), a.forward.stage, a.backward.stage) for a in actions if a.kind == "FB")
    pair = pairs[median_low(overlapped)[1:]] if pairs and overlapped else None
    return Step(line, rank, parts, pair)


def _tail(
    job: Job, times: Times, held: list[Held], actions: list[Action], ends: list[float], makespan: float
) -> tuple[float, float, float]:
    """After the pipeline: seconds until the gradients are reduced, of the update, and of the gather."""
    done = {action.backward.stage: end for action, end in zip(actions, ends, strict=True) if action.backward is not None}
    free = gather = 0.0
    for ready, ranks, grads, weights in _groups(job, held, done):
        free = max(free, ready) + times.collective("reduce", ranks, grads)
        gather += times.collective("gather", ranks, weights)
    return max(free - makespan, 0.0), times.optimizer(update_bytes(job, held)), gather


def _groups(job: Job, held: list[Held], done: dict[int, float]) -> list[tuple[float, tuple[int, ...], float, float]]:
    """What is reduced together: when its gradients are complete, over which ranks, bytes of gradients and weights."""
    groups: dict[tuple[float, tuple[int, ...]], list[Held]] = {}
    for one in held:
        groups.setdefault((max(done[stage] for stage in one.stages), one.ranks), []).append(one)
    return [(ready, ranks, job.formats.main * sum(one.numel for one in group),
             sum(one.numel * one.itemsize for one in group)) for (ready, ranks), group in sorted(groups.items())]


def tail_seconds(job: Job, times: Times) -> dict[str, float]:
    """Of a whole step's reductions and gathers, as if nothing hid them, and of the update: of the slowest rank each."""
    found = {"reduce": 0.0, "gather": 0.0, "optimizer": 0.0}
    for held in holdings(job):
        groups = _groups(job, held, dict.fromkeys(range(len(job.layout.partition.stages)), 0.0))
        each = {
            "reduce": sum(times.collective("reduce", ranks, grads) for _, ranks, grads, _ in groups),
            "gather": sum(times.collective("gather", ranks, weights) for _, ranks, _, weights in groups),
            "optimizer": times.optimizer(update_bytes(job, held)),
        }
        found = {name: max(seconds, each[name]) for name, seconds in found.items()}
    return found


def update_bytes(job: Job, held: list[Held]) -> float:
    """Norm and zeroing of gradients, AdamW on this rank's part, and the quantisation of what FP8 keeps twice."""
    main, moved = job.formats.main, 0.0
    for one in held:
        own = one.numel / len(one.ranks)
        master = 2 * main if one.itemsize < main else 0
        moved += own * (3 * main + master + 2 * job.formats.moments + 2 * one.itemsize) + one.numel * main
        moved += one.numel * 4 if one.quantized else 0
    return moved


def sent_bytes(job: Job, times: Times, schedule: Schedule, held: list[list[Held]]) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends in a step, the rank that sends most of each kind: {what: {slow, fast}}."""
    traffic, layout, model = messages(schedule), job.layout, job.config.model
    by_rank: dict[str, list[Links]] = {"experts": [], "pipeline": [], "gradients": [], "weights": []}
    layer = sum(times.links.values(), Links())
    for rank, actions in enumerate(schedule.actions):
        moe = {stage: sum(u.layer(model) is not None and u.layer(model) >= model.first_k_dense_replace for u in units)
               for stage, units in enumerate(layout.partition.stages)}
        by_rank["experts"].append(layer * sum(moe[a.forward.stage] for a in actions if a.forward is not None))
        sent = Links()
        for message in (m for of_action in traffic.produces[rank] for m in of_action):
            ends = (message.source * layout.mesh.dp, message.target * layout.mesh.dp)
            size = hidden_bytes(job)
            sent += Links(slow=size) if job.is_slow(ends) else Links(fast=size)
        by_rank["pipeline"].append(sent)
        main = job.formats.main
        for what, bytes_of in (("gradients", lambda one: one.numel * main), ("weights", lambda o: o.numel * o.itemsize)):
            by_rank[what].append(sum((links_between(job, one.ranks, bytes_of(one)) for one in held[rank]), Links()))
    worst = {what: max(links, key=lambda one: one.slow + one.fast) for what, links in by_rank.items()}
    return {what: {"slow": one.slow, "fast": one.fast} for what, one in worst.items()}
