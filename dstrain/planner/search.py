"""`dstrain plan search=true`: every layout of the cluster's GPUs, what forbids it or how fast it is.

Enumerated: pipeline ranks, expert-parallel ranks, schedule, sequences of a micro-batch, recomputation. A layout that
does not divide, that its schedule forbids or that does not fit is dropped with its reason. Of what
remains, with training's own partition, the best by an estimate are priced list by list. The very best get the fastest
partition within the memory too (planner/stages.py), and so do those that would be faster but miss it by little.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dstrain.config.checks import SCHEDULES
from dstrain.config.errors import InputError
from dstrain.config.schema import PlanConfig
from dstrain.planner.job import Job
from dstrain.planner.memory import GIB
from dstrain.planner.plan import Plan
from dstrain.planner.stages import fastest_stages
from dstrain.planner.times import Factors, Times

MOST_PP = 64
MICRO = (1, 2, 4)
PRICED = 16  # layouts whose whole lists are priced, the best by an estimate
REFINED, NEARLY = 2, 6  # layouts whose partition is searched, of those that fit and of those that nearly do
NEAR = 0.2  # of a GPU's memory: by how much a layout may miss it and still be worth another partition


@dataclass(frozen=True)
class Found:
    """A layout that works, or one whose memory does not suffice."""

    plan: Plan
    stages: list[int] | None  # null: training's own partition

    @property
    def speed(self) -> float:
        return self.plan.tokens_per_second_per_gpu

    @property
    def guess(self) -> float:
        """As `speed`, of the estimate."""
        return self.plan.tokens_per_step / self.plan.estimate

    @property
    def fits(self) -> bool:
        return self.plan.over <= 0

    def overrides(self) -> str:
        """What makes a command line of it."""
        config = self.plan.job.config
        p = config.parallel
        text = f"parallel.pp={p.pp} parallel.ep={p.ep} parallel.schedule={p.schedule} batch.micro_sequences="
        text += f"{config.batch.micro_sequences} parallel.recompute={p.recompute}"
        return text + (f" 'parallel.stages={self.stages}'".replace(", ", ",") if self.stages else "")

    def binds(self) -> str:
        """What keeps it from being faster, or from fitting."""
        if not self.fits:
            return f"memory, by {self.plan.over / GIB:.1f} GiB"
        parts = {name: seconds for name, seconds in self.plan.step.parts.items() if name != "compute"}
        worst = max(parts, key=parts.get)
        share = parts[worst] / self.plan.step.seconds
        return f"{worst.replace('_', ' ')} {share:.0%}, {-self.plan.over / GIB:.1f} GiB left"


def candidates(config: PlanConfig) -> Iterator[PlanConfig]:
    gpus, experts = config.cluster.gpus, config.model.n_routed_experts
    for pp in (n for n in range(1, MOST_PP + 1) if gpus % n == 0):
        for ep in (n for n in range(1, experts + 1) if experts % n == 0 and gpus // pp % n == 0):
            for schedule in SCHEDULES if pp > 1 else ("1f1b",):
                for micro in MICRO:
                    for recompute in ("none", "block"):
                        parallel = replace(config.parallel, pp=pp, ep=ep, schedule=schedule, recompute=recompute)
                        yield replace(config, batch=replace(config.batch, micro_sequences=micro),
                                      parallel=replace(parallel, stages=None))


def search(config: PlanConfig, factors: Factors) -> tuple[list[Found], Counter]:
    """-> layouts that fit, the fastest first; why others were dropped: {reason: layouts}."""
    found, dropped, near = [], Counter(), []
    room = config.cluster.memory_gib * GIB
    partitions: dict[tuple[str, int], list[int]] = {}
    for one in candidates(config):
        key = one.parallel.schedule, one.parallel.pp
        try:
            job = Job.of(replace(one, parallel=replace(one.parallel, stages=partitions.get(key))))
        except InputError as error:
            dropped[reason(str(error))] += 1
            continue
        partitions[key] = [len(units) for units in job.layout.partition.stages]
        plan = Plan.of(job, Times(job, factors))
        if plan.least_memory < (1 + NEAR) * room and plan.over < NEAR * room:
            (found if plan.over <= 0 else near).append(Found(plan, None))
        dropped["memory"] += plan.least_memory > room or plan.over > 0
    found.sort(key=lambda one: one.guess, reverse=True)
    best = found[0].guess if found else 0
    near = sorted((one for one in near if one.guess > best), key=lambda one: one.guess, reverse=True)
    priced = found[:PRICED]
    for one in [*near[:NEARLY], *found[:REFINED]]:
        refined = refine(one, factors)
        if refined is not None and refined.fits:
            priced.append(refined)
            dropped["memory"] -= not one.fits
    priced.sort(key=lambda one: one.speed, reverse=True)
    return priced, +dropped


def refine(one: Found, factors: Factors) -> Found | None:
    """The same layout with the fastest partition that fits; None where there is no other."""
    plan = one.plan
    counts = fastest_stages(plan.job, plan.times, plan.held)
    if counts in (None, [len(units) for units in plan.job.layout.partition.stages]):
        return None
    config = plan.job.config
    job = Job.of(replace(config, parallel=replace(config.parallel, stages=counts)))
    return Found(Plan.of(job, Times(job, factors)), counts)


def reason(line: str) -> str:
    """The rule that an error names, without its numbers."""
    for words, name in (("micro-batches", "micro-batches of the schedule"), ("units", "fewer units than stages"),
                        ("multiple of", "the batch does not divide"), ("data ranks", "the batch does not divide"),
                        ("divisible", "the batch does not divide"), ("nodes", "expert ranks do not fill nodes"),
                        ("even number of ranks", "dualpipe needs an even number of ranks")):
        if words in line:
            return name
    return line


def lines(found: list[Found], dropped: Counter, most: int = 15) -> list[str]:
    """The table of a search."""
    out = [f"{len(found)} layouts, the fastest that fit; tokens/s/GPU, step, memory GiB, what binds, and the keys:"]
    for one in found[:most]:
        memory = one.plan.memory[one.plan.worst].gib()["total"]
        seconds = one.plan.step.seconds
        out.append(f"{one.speed:8,.0f}  {seconds:8.2f} s  {memory:6.1f}  {one.binds():<52}{one.overrides()}")
    total = sum(dropped.values())
    return [*out, f"dropped {total}: " + ", ".join(f"{count} {why}" for why, count in dropped.most_common())]
