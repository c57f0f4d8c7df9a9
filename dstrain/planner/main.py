"""`dstrain plan`: what a run needs, how long it takes, what it costs; a schedule by itself; the layouts that work."""

import json
import shutil
import sys
from dataclasses import replace

from dstrain.config.errors import InputError
from dstrain.config.schema import PlanConfig
from dstrain.parallel.schedules.actions import Schedule
from dstrain.parallel.schedules.build import build_schedule
from dstrain.parallel.schedules.check import Checked, check
from dstrain.parallel.schedules.simulate import FORMULAS, Timeline, bubble, simulate
from dstrain.planner import report, search
from dstrain.planner.draw import draw_svg, draw_text, title
from dstrain.planner.job import Job
from dstrain.planner.measured import load_factors
from dstrain.planner.memory import GIB
from dstrain.planner.plan import Plan, whole_run
from dstrain.planner.rehearsal.report import as_json, lines
from dstrain.planner.rehearsal.whole import rehearse
from dstrain.planner.times import Times


def plan(config: PlanConfig) -> int:
    """Print what was asked for. -> the exit code. Raises InputError where the layout cannot run, or does not fit."""
    if config.rehearse and (config.search or config.cluster is None):
        raise InputError("rehearse=true: is of one layout on a cluster; give cluster=… (h800_2048, h100, h200, b200) "
                         "and search=false")
    if config.cluster is None and config.batch.micro_batches is not None:
        return show_schedule(config)
    factors = load_factors(config.phases) if config.phases else {}
    if config.search:
        return show_search(config, factors)
    try:
        job = Job.of(config)
    except InputError as error:
        raise InputError(f"{error}{nearest_layouts(config, factors)}" if config.cluster else str(error)) from None
    found = Plan.of(job, Times(job, factors))
    run = whole_run(found)
    rehearsed = rehearse(found, lambda line: print(line, file=sys.stderr)) if config.rehearse else None
    if config.output == "json":
        extra = {"rehearsal": as_json(rehearsed)} if rehearsed else {}
        print(json.dumps(report.as_json(found, run) | extra))
    else:
        print("\n".join(report.lines(found, run) + (lines(rehearsed) if rehearsed else [])))
    if config.show or config.out is not None:
        picture(config, found.schedule, found.step.line)
    if found.over > 0:
        memory = found.memory[found.worst].gib()
        kind = max((k for k in memory if k != "total"), key=memory.get)
        raise InputError(
            f"pipeline rank {found.worst} needs {memory['total']:.1f} GiB, {found.over / GIB:.1f} more than the "
            f"{job.cluster.memory_gib:g} of cluster {job.cluster.name} (most of it {kind}, {memory[kind]:.1f})"
            f"{nearest_layouts(config, factors)}"
        )
    if rehearsed and rehearsed.worst.needs > rehearsed.room:
        worst, cluster = rehearsed.worst, job.cluster
        raise InputError(
            f"rank {worst.rank} (pipeline rank {worst.pp_rank}) reaches "
            f"{worst.needs / GIB + cluster.reserved_gib:.2f} GiB in the rehearsal, "
            f"{(worst.needs - rehearsed.room) / GIB:.2f} more than the {cluster.memory_gib:g} of cluster {cluster.name}; "
            "valid: fewer units on its stages (parallel.stages), parallel.recompute=block or smaller micro-batches"
        )
    return 0


def show_search(config: PlanConfig, factors: dict[str, float]) -> int:
    """The table of all layouts, or the keys of a plan for each of the fastest as a JSON list."""
    if config.cluster is None:
        raise InputError("search=true needs a cluster: give cluster=… (h800_2048, h100, h200, b200)")
    found, dropped = search.search(config, factors)
    if config.output == "json":
        best = [report.as_json(one.plan, whole_run(one.plan)) | {"overrides": one.overrides(), "binds": one.binds()}
                for one in found[:15]]
        print(json.dumps({"layouts": best, "dropped": dict(dropped)}))
    else:
        print("\n".join(search.lines(found, dropped)))
    return 0


def nearest_layouts(config: PlanConfig, factors: dict[str, float]) -> str:
    """The layouts that work and differ from what was asked in the fewest keys, for the end of an error's line."""
    asked, micro = config.parallel, config.batch.micro_sequences

    def distance(one: search.Found) -> tuple[int, float]:
        p = one.plan.job.config.parallel
        changed = [p.pp != asked.pp, p.ep != asked.ep, p.schedule != asked.schedule, p.recompute != asked.recompute,
                   one.plan.job.config.batch.micro_sequences != micro]
        return sum(changed), -one.speed

    found, _ = search.search(replace(config, parallel=replace(asked, stages=None)), factors)
    nearest = sorted(found, key=distance)[:2]
    if not nearest:
        return "; no layout works"
    return f"; nearest that work: {'; or '.join(one.overrides() for one in nearest)}"


def show_schedule(config: PlanConfig) -> int:
    """The schedule's figures in units of a forward, with `show` its drawing too."""
    if config.output == "json":
        raise InputError("output=json needs a cluster: give cluster=… (h800_2048, h100, h200, b200)")
    schedule = build_schedule(config.parallel.schedule, config.parallel.pp, config.batch.micro_batches)
    checked, line = check(schedule), simulate(schedule)
    print(title(schedule, line))
    if config.show:
        print(f"\n{draw_text(schedule, shutil.get_terminal_size().columns)}")
    print("\n" + "\n".join(table(schedule, checked, line.idle())))
    holds = f", from {schedule.ranks} micro-batches on" if schedule.name == "zb1p" else ""
    print(f"\nidle by formula{holds}: {FORMULAS[schedule.name]} = {bubble(schedule.name, schedule.ranks):g}")
    print("unit of time: a forward F; B = 2F, of which W = F; F&B = 3F; transfers are free")
    if config.show or config.out is not None:
        picture(config, schedule, None)
    return 0


def picture(config: PlanConfig, schedule: Schedule, line: Timeline | None) -> None:
    """Write the timeline; line: in seconds, None: in forwards."""
    path = config.out or f"{schedule.name}-{schedule.ranks}x{schedule.micro_batches}.svg"
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(draw_svg(schedule, line))
    except OSError as error:
        raise InputError(f"out={path}: cannot write the picture: {error.strerror}") from None
    if config.output == "table":
        print(f"picture: {path}")


def table(schedule: Schedule, checked: Checked, idle: list[float]) -> list[str]:
    """Operations, idle time and memory of every rank, as lines."""
    rows = [["rank", "stages", "F", "B", "b", "W", "F&B", "idle", "peak", "queue"]]
    for rank, actions in enumerate(schedule.actions):
        kinds = ["b" if action.split else action.kind for action in actions]
        rows.append([str(rank), " ".join(map(str, schedule.stages_of(rank))),
                     *(str(kinds.count(kind)) for kind in ("F", "B", "b", "W", "FB")),
                     f"{idle[rank]:g}", str(checked.alive[rank]), str(checked.queued[rank])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return [*lines, "B: whole backwards; b: split ones, W: their weight gradients; F&B: overlapped pairs",
            "peak: most micro-batches with activations alive, counted per stage; queue: most weight gradients waiting"]
