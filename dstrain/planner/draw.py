"""Drawings of a schedule: a row per rank, time to the right. As text for a terminal, as an SVG picture for the rest."""

from html import escape

from dstrain.parallel.schedules.actions import Action, Schedule
from dstrain.parallel.schedules.simulate import Timeline, simulate

MOST_PANELS = 6  # of the text drawing

# Fill by kind, for the first and the second stage of a rank. b: a split backward.
COLOURS = {
    "F": ("#9cc3f0", "#5a8fd0"),
    "B": ("#8fce9b", "#4fa564"),
    "b": ("#e6efb4", "#c3d46a"),
    "W": ("#f7c873", "#e09b2d"),
}
IDLE, INK = "#ececec", "#1b1b1b"
LEFT, TOP, ROW, GAP = 62, 78, 30, 5  # pixels


def draw_text(schedule: Schedule, columns: int) -> str:
    """The schedule in slots of one forward, `columns` characters wide: F=1, B=2 (b, split: 1), W=1, a pair 3.

    What does not fit beside goes below, up to MOST_PANELS panels; the rest is cut with a note.
    """
    line, digits = simulate(schedule), len(str(schedule.micro_batches - 1))
    cell, margin = digits + 2, len(f"rank {schedule.ranks - 1}  ")
    slots, beside = round(line.makespan), max(1, (columns - margin) // cell)
    rows = [_row(schedule.actions[rank], line, rank, slots, cell) for rank in range(schedule.ranks)]
    ruler = "".join(str(slot).ljust(5 * cell) for slot in range(0, slots, 5))
    parts = []
    for first in range(0, min(slots, MOST_PANELS * beside), beside):
        piece = slice(first * cell, (first + beside) * cell)
        parts.append("\n".join([("time".ljust(margin) + ruler[piece]).rstrip()] + [
            (f"rank {rank}".ljust(margin) + row[piece]).rstrip() for rank, row in enumerate(rows)]))
    if slots > MOST_PANELS * beside:
        parts.append(f"… times {MOST_PANELS * beside} to {slots} are cut: see the picture, or use a wider terminal")
    parts.append("F3 forward of micro-batch 3   B3 its backward   b3 its backward without weight gradients   "
                 "W3 these   F5&B3 a pair, overlapped   . idle")
    return "\n\n".join(parts)


def _row(actions: list[Action], line: Timeline, rank: int, slots: int, cell: int) -> str:
    row = [".".ljust(cell)] * slots
    for action, start, end in zip(actions, line.start[rank], line.end[rank], strict=True):
        room = round(end - start) * cell
        text = _label(action).ljust(room - 1, "-" if room > cell else " ") + " "
        for i in range(round(end - start)):
            row[round(start) + i] = text[i * cell : (i + 1) * cell]
    return "".join(row)


def _label(action: Action) -> str:
    if action.kind == "FB":
        return f"F{action.forward.micro_batch}&B{action.backward.micro_batch}"
    return f"{'b' if action.split else action.kind}{(action.forward or action.backward).micro_batch}"


def draw_svg(schedule: Schedule, line: Timeline | None = None) -> str:
    """The schedule as an SVG document. Pointing at an action names it.

    line: when its actions run, in seconds; None: as simulated, in forwards of one stage.
    """
    timed, line = line is not None, line or simulate(schedule)
    # pixels: the shortest action holds its number; in a timeline of seconds the shortest may be tiny, so the mean one
    digits = 8 + 7 * len(str(schedule.micro_batches - 1))
    busy, count = line.makespan * schedule.ranks - sum(line.idle()), sum(map(len, schedule.actions))
    unit = digits * count / max(busy, 1e-12) if timed else digits
    width, bottom = LEFT + unit * line.makespan + 20, TOP + schedule.ranks * (ROW + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 920):.0f}" height="{bottom + 48}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title(schedule, line))}{" seconds" * timed}</text>',
        *_legend(schedule),
    ]
    for rank, actions in enumerate(schedule.actions):
        y, stages = TOP + rank * (ROW + GAP), schedule.stages_of(rank)
        parts.append(f'<text x="{LEFT - 8}" y="{y + ROW / 2 + 4}" text-anchor="end">rank {rank}</text>')
        parts.append(_box(LEFT, y, unit * line.makespan, ROW, IDLE))
        for action, start, end in zip(actions, line.start[rank], line.end[rank], strict=True):
            x, wide = LEFT + unit * start, unit * (end - start)
            words = escape(f"{action}, {start:g} to {end:g}")
            parts.append(f"<g><title>{words}</title>{_action(action, stages, x, y, wide)}</g>")
    return "\n".join([*parts, *_axis(line.makespan, unit, bottom, timed), "</svg>"]) + "\n"


def title(schedule: Schedule, line: Timeline) -> str:
    """Name, size and bubble of a schedule in words."""
    idle = max(line.idle())
    return (f"{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches: "
            f"idle {idle:g} of {line.makespan:g} ({idle / line.makespan:.1%})")


def _action(action: Action, stages: list[int], x: float, y: float, wide: float) -> str:
    """One action's boxes; a pair has its forward above its backward."""
    parts = [("F", action.forward)] if action.forward is not None else []
    if action.backward is not None:
        parts.append(("b" if action.split else "W" if action.kind == "W" else "B", action.backward))
    high, drawn = ROW / len(parts), ""
    for i, (colour, work) in enumerate(parts):
        top = y + i * high
        drawn += _box(x, top, wide, high, COLOURS[colour][stages.index(work.stage)], "white")
        middle = f'x="{x + wide / 2:.1f}" y="{top + high / 2 + 4:.1f}" text-anchor="middle"'
        drawn += f"<text {middle}>{work.micro_batch}</text>"
    return drawn


def _box(x: float, y: float, wide: float, high: float, fill: str, edge: str = "none") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{fill}" stroke="{edge}"/>'


def _legend(schedule: Schedule) -> list[str]:
    """Colours and their meaning, those that occur."""
    kinds = {"b" if action.split else action.kind for actions in schedule.actions for action in actions}
    entries = {"F": "forward", "B": "backward", "b": "backward, weight gradients kept", "W": "weight gradients",
               "FB": "overlapped pair"}
    pairs = len(schedule.stages_of(0)) > 1
    parts, x = [], LEFT
    for kind, words in entries.items():
        if kind not in kinds:
            continue
        for tone in range(1 + pairs):
            high = 14 / len(kind)  # a pair's letters are its two colours, one above the other
            parts += [_box(x, 38 + i * high, 18, high, COLOURS[letter][tone], "white") for i, letter in enumerate(kind)]
            x += 18
        parts.append(f'<text x="{x + 5}" y="49">{words}</text>')
        x += 24 + 6 * len(words)
    parts += [_box(x, 38, 18, 14, IDLE), f'<text x="{x + 23}" y="49">idle</text>']
    if pairs:
        parts.append(f'<text x="{LEFT}" y="67">darker: the second of a rank\'s two stages</text>')
    return parts


def _axis(makespan: float, unit: float, bottom: int, timed: bool) -> list[str]:
    parts = [f'<path d="M{LEFT} {bottom}H{LEFT + unit * makespan:.1f}" stroke="{INK}"/>']
    step = 1 if timed else 5
    for time in range(0, int(makespan) + 1, step):
        x = LEFT + unit * time
        parts.append(f'<path d="M{x} {bottom}v5" stroke="{INK}"/>'
                     f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{time}</text>')
    words = f"time, in {'seconds' if timed else 'forwards of one stage'}; the number is the micro-batch"
    parts.append(f'<text x="{LEFT}" y="{bottom + 36}">{words}</text>')
    return parts
