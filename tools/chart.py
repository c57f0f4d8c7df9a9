"""A small chart as an SVG document: points joined by lines, one colour a series, axes from zero."""

from html import escape

COLOURS = ["#2f6db5", "#d9822b", "#3f9b57", "#a3477f", "#6b6b6b"]
INK, RULE = "#1b1b1b", "#dddddd"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 340, 64, 20, 44, 56  # pixels

Series = dict[str, list[tuple[float, float]]]


def chart(title: str, x_name: str, y_name: str, series: Series) -> str:
    """series: name -> its points (x, y), both 0 or more. Every x that occurs is marked on the axis."""
    points = [point for line in series.values() for point in line]
    right = max([x for x, _ in points] or [1]) or 1
    step = nice(max([y for _, y in points] or [1]) / 5)
    top = step * 5
    while any(y > top for _, y in points):
        top += step

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / right, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * y / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
    ]
    for number in range(round(top / step) + 1):
        x, y = place(0, number * step)
        parts.append(f'<line x1="{x:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    for value in spaced(sorted({x for x, _ in points}), lambda value: place(value, 0)[0]):
        x, y = place(value, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{value:g}</text>')
    for number, (name, line) in enumerate(series.items()):
        colour, places = COLOURS[number % len(COLOURS)], [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for (x, y), (value, height) in zip(places, line):
            words = escape(f"{name}: {height:.4g} at {value:g}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{words}</title></circle>')
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 14 + 16 * number}" fill="{colour}">{escape(name)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 6}">{escape(y_name)}</text></svg>')
    return "\n".join(parts) + "\n"


def nice(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below `value`."""
    power = 1e-9
    while 10 * power < value:
        power *= 10
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))


def spaced(values: list[float], place, least: float = 28) -> list[float]:
    """Those of rising values whose labels have room: each at least so many pixels after the one before it."""
    kept: list[float] = []
    for value in values:
        if not kept or place(value) - place(kept[-1]) >= least:
            kept.append(value)
    return kept
