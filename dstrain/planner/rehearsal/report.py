"""A rehearsal beside its plan, as lines for people and as the object `rehearsal` of a plan's JSON."""

import torch

from dstrain.planner.memory import GIB
from dstrain.planner.rehearsal.ledger import KINDS, Peak
from dstrain.planner.rehearsal.rank import Rehearsed
from dstrain.planner.rehearsal.whole import Rehearsal

MOST = 8  # tensors and shapes that the lines name, those with most bytes


def as_json(found: Rehearsal) -> dict:
    """memory_gib: at the peak of the step; buffers with what the cluster reserves, as the plan has it."""
    plan = found.plan
    return {
        "ranks_of": found.job.layout.mesh.world_size,
        "micro_batches": found.micro_batches,
        "largest_load": found.largest_load,
        "sent_gib": {what: {link: size / GIB for link, size in links.items()} for what, links in found.sent().items()},
        "ranks": [
            {
                "rank": one.rank,
                "pipeline_rank": one.pp_rank,
                "load": load,
                "rows_over_mean": one.load,
                "memory_gib": memory_gib(found, one.peak),
                "planned_gib": plan.memory[one.pp_rank].gib(),
                "start_gib": one.start.total / GIB,
                "sent": [{"what": what, "shape": list(shape), "type": _name(dtype), "times": times}
                         for (what, shape, dtype), times in one.messages.shapes.items()],
                "sent_bytes": {f"{what}_{link}": size for (what, link), size in one.messages.bytes.items()},
                "dispatch": one.phases,
                "kept": [{"kind": kind, "shape": list(shape), "type": _name(dtype), "count": count}
                         for (kind, shape, dtype), count in one.peak.tensors.items()],
            }
            for load, ranks in found.ranks.items() for one in ranks
        ],
    }


def memory_gib(found: Rehearsal, peak: Peak) -> dict[str, float]:
    reserved = found.plan.job.cluster.reserved_gib
    kinds = {kind: peak.bytes[kind] / GIB + (reserved if kind == "buffers" else 0) for kind in KINDS}
    return kinds | {"total": sum(kinds.values())}


def lines(found: Rehearsal) -> list[str]:
    mesh, plan = found.job.layout.mesh, found.plan
    names = " and ".join(f"{load} ({ranks[0].load:.4g} times the mean rows)" for load, ranks in found.ranks.items())
    out = [
        "",
        f"rehearsal: {mesh.pp} of {mesh.world_size} ranks differ; each was built and stepped once, "
        f"{found.micro_batches} micro-batches, loads {names}",
        "GiB rehearsed / planned" + "".join(kind.rjust(16) for kind in (*KINDS, "total")),
    ]
    for load, ranks in found.ranks.items():
        for one in ranks:
            own, planned = memory_gib(found, one.peak), plan.memory[one.pp_rank].gib()
            cells = (f"{own[kind]:.2f} / {planned[kind]:.2f}" if load == "balanced" else f"{own[kind]:,.2f}"
                     for kind in (*KINDS, "total"))
            out.append(f"rank {one.rank:<6} {load:<11}" + "".join(cell.rjust(16) for cell in cells))
    if found.largest_load is not None:
        out.append(f"experts' rows  up to {found.largest_load:.3g} times the mean on one rank, in all layers and "
                   "micro-batches at once, fit")
    sent, planned = found.sent(), plan.sent()
    out.append("sent           GiB a step and GPU, the most of any, rehearsed / planned: " + ", ".join(
        f"{what} {sum(links.values()) / GIB:.2f} / {sum(planned[what].values()) / GIB:.2f} "
        f"({links['slow'] / GIB:.2f} / {planned[what]['slow'] / GIB:.2f} between nodes)"
        for what, links in sent.items()))
    worst = found.worst
    return [*out, f"messages of rank {worst.rank}, what: times, shape, type", *_messages(worst),
            f"alive at the peak of rank {worst.rank}, most bytes first: GiB, count, kind, shape, type", *_kept(worst)]


def _messages(one: Rehearsed) -> list[str]:
    out = []
    for what in sorted({what for what, _, _ in one.messages.shapes}):
        found = [(times, shape, dtype) for (w, shape, dtype), times in one.messages.shapes.items() if w == what]
        shapes = sorted(found, key=lambda s: -s[0] * torch.Size(s[1]).numel() * s[2].itemsize)
        words = [f"{times:,} x {list(shape)} {_name(dtype)}" for times, shape, dtype in shapes[:MOST]]
        more = f", and {sum(s[0] for s in shapes[MOST:]):,} of {len(shapes) - MOST} other shapes"
        out.append(f"  {what}: " + ", ".join(words) + (more if len(shapes) > MOST else ""))
    return out


def _kept(one: Rehearsed) -> list[str]:
    sizes = sorted(((count * torch.Size(shape).numel() * dtype.itemsize, count, kind, shape, dtype)
                    for (kind, shape, dtype), count in one.peak.tensors.items()), key=lambda s: -s[0])
    return [f"  {size / GIB:7.2f}  {count:5}  {kind:<12} {list(shape)} {_name(dtype)}"
            for size, count, kind, shape, dtype in sizes[:MOST]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
