"""`dstrain plan`: what a pipeline schedule does on every rank, how long it idles, and how it looks."""

import shutil

from dstrain.config.errors import InputError
from dstrain.config.schema import PlanConfig
from dstrain.parallel.schedules.actions import Schedule
from dstrain.parallel.schedules.build import build_schedule
from dstrain.parallel.schedules.check import Checked, check
from dstrain.parallel.schedules.simulate import FORMULAS, bubble, simulate
from dstrain.planner.draw import draw_svg, draw_text, title


def plan(config: PlanConfig) -> int:
    """Print the schedule's figures, with `show` its drawing too; write the picture. -> the exit code."""
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
        path = config.out or f"{schedule.name}-{schedule.ranks}x{schedule.micro_batches}.svg"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(draw_svg(schedule))
        except OSError as error:
            raise InputError(f"out={path}: cannot write the picture: {error.strerror}") from None
        print(f"picture: {path}")
    return 0


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
