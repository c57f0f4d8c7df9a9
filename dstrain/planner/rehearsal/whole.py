"""`dstrain plan rehearse=true`: every distinct rank of a layout is built and stepped once, beside the plan's figures.

The data ranks of a pipeline rank hold and do the same. The first of each is rehearsed, the rank p · dp: together they
are one whole pipeline, and under the worst load the ranks that get most.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dstrain.config.errors import InputError
from dstrain.planner.job import Job
from dstrain.planner.memory import GIB
from dstrain.planner.plan import Plan
from dstrain.planner.rehearsal.loads import LOADS
from dstrain.planner.rehearsal.rank import Rehearsed, rehearse_rank, short_job


class Disagreement(RuntimeError):
    """Two ranks would wait for each other, or take bytes for something else."""


@dataclass(frozen=True)
class Rehearsal:
    """ranks: by load, of every pipeline rank in its order."""

    plan: Plan
    job: Job  # what was stepped: the plan's, with few micro-batches
    ranks: dict[str, list[Rehearsed]]

    @property
    def micro_batches(self) -> int:
        return self.job.micro_batches(self.job.config.batch.sequences)

    @property
    def room(self) -> float:
        """Bytes of a GPU that are left for what is counted."""
        return (self.plan.job.cluster.memory_gib - self.plan.job.cluster.reserved_gib) * GIB

    @property
    def worst(self) -> Rehearsed:
        """Of the balanced load, the rank that needs most."""
        return max(self.ranks["balanced"], key=lambda one: one.needs)

    @property
    def largest_load(self) -> float | None:
        """Rows of the busiest ranks over the mean, in all layers and micro-batches at once, that just fit.

        Between the two loads memory grows by the same for every row. None: there is one load, or the balanced one
        does not fit.
        """
        if "worst" not in self.ranks or self.worst.needs > self.room:
            return None
        found = []
        for even, uneven in zip(self.ranks["balanced"], self.ranks["worst"], strict=True):
            grown = (uneven.needs - even.needs) / max(uneven.load - even.load, 1e-9)
            found.append(even.load + (self.room - even.needs) / grown if grown > 0 else uneven.load)
        return min(*found, self.ranks["worst"][0].load)

    def sent(self) -> dict[str, dict[str, float]]:
        """As `Plan.sent`: bytes of a step of the full batch, of the rank that sends most, under the balanced load."""
        full = self.plan.job.micro_batches(self.plan.job.config.batch.sequences) / self.micro_batches
        found = {}
        for what in ("experts", "pipeline", "gradients", "weights"):
            times = full if what in ("experts", "pipeline") else 1.0
            each = [{link: one.messages.bytes[what, link] * times for link in ("slow", "fast")}
                    for one in self.ranks["balanced"]]
            found[what] = max(each, key=lambda links: sum(links.values()))
        return found


def rehearse(plan: Plan, tell: Callable[[str], None]) -> Rehearsal:
    """tell: gets a line for every rank that is done.

    Raises InputError with the rank's number where training would refuse to start; any other error of a rank has a note
    that names it.
    """
    if plan.job.config.precision.name == "fp64":
        raise InputError("rehearse=true: precision=fp64 is for equality tests on small models; valid: bf16, fp32, fp8")
    job, mesh = short_job(plan.job), plan.job.layout.mesh
    loads = LOADS if mesh.ep > 1 else LOADS[:1]  # where every rank has all experts there is one load
    found: dict[str, list[Rehearsed]] = {load: [] for load in loads}
    for pp_rank in range(mesh.pp):
        rank = pp_rank * mesh.dp
        for load in loads:
            try:
                found[load].append(one := rehearse_rank(job, rank, load))
            except InputError as error:
                raise InputError(f"rank {rank}: {error}") from error
            except Exception as error:
                where = f"rank {rank} of {mesh.world_size}, pipeline rank {pp_rank}, {load} load"
                error.add_note(f"in the rehearsal of {where}")
                raise
        tell(f"rehearsed rank {rank}, pipeline rank {pp_rank + 1} of {mesh.pp}: {one.seconds:.1f} s")
    for ranks in found.values():
        agree(job, ranks)
    return Rehearsal(plan, job, found)


def agree(job: Job, ranks: list[Rehearsed]) -> None:
    """Raises Disagreement unless what one rank sends another takes, and all ranks of a group call the same in order."""
    by_rank = {one.rank: one for one in ranks}
    for one in ranks:
        for (source, target), sent in one.messages.sent.items():
            taken = by_rank[target].messages.received.get((source, target), [])
            if sent != taken:
                raise Disagreement(f"rank {source} sends rank {target} {_first(sent, taken)}")
        for (source, target), taken in one.messages.received.items():
            if (source, target) not in by_rank[source].messages.sent:
                raise Disagreement(f"rank {target} waits for {len(taken)} messages of rank {source}, which sends none")
    orders: dict[tuple, Rehearsed] = {}
    for one in ranks:
        for group, order in one.messages.order.items():
            first = orders.setdefault(group, one)
            if first.messages.order[group] != order:
                difference = _first(first.messages.order[group], order)
                raise Disagreement(f"ranks {first.rank} and {one.rank} of one group of {len(group[0])}: {difference}")


def _first(ours: list, theirs: list) -> str:
    """Where two lists part."""
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    a, b = (str(one[place]) if place < len(one) else "nothing" for one in (ours, theirs))
    return f"{a} as number {place + 1}, where the other has {b}"
