"""The report as one HTML page: style, script and numbers in it, nothing fetched.

Everything that comes from a run is text, escaped here; the script puts text in as text and never as HTML.
"""

import json
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from dstrain.telemetry.report_panels import CELLS, run_data, sections
from dstrain.telemetry.report_read import Run
from dstrain.telemetry.report_tables import evaluations, facts, notes, settings, skipped, slowest, starving_card

FILES = Path(__file__).resolve().parent
SCRIPTS = ("report_tools.js", "report_charts.js", "report_load.js")
SMOOTHING = {1: "off", 5: "5 points", 15: "15 points", 51: "51 points"}
STATUS = ("finished", "interrupted", "failed")
# The browser itself makes sure that nothing is fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(runs: list[Run]) -> str:
    """The whole page of one run, or of several laid over each other. Names of runs differ."""
    charts, parts = [], []
    for title, panels in sections(runs):
        beside = starving_card(runs) if title == "Experts" else ""
        below = below_panels(title, runs)
        if panels or beside or below:
            figures = "".join(_figure(panel, len(charts) + i) for i, panel in enumerate(panels))
            charts += panels
            parts.append(f"<section><h2>{title}</h2><div class=grid>{figures}{beside}</div>{below}</section>")
    if not any(run.steps for run in runs):
        parts.append("<section><p class=empty>No step has been taken yet.</p></section>")
    data = {"panels": charts, "runs": [run_data(run, CELLS // len(runs)) for run in runs]}
    scripts = "".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
        f"<title>{escape(', '.join(run.name for run in runs))} – dstrain</title>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        '<meta name=color-scheme content="light dark"><link rel=icon href="data:,">\n'
        f"<style>{(FILES / 'report.css').read_text(encoding='utf-8')}</style></head>\n"
        f"<body><main>{_head(runs)}{_controls(runs)}{''.join(parts)}{settings(runs)}{_foot(runs)}</main>"
        "<div id=tip hidden></div><noscript><p class=empty>The charts need JavaScript.</p></noscript>\n"
        f'<script type="application/json" id=numbers>{_json(data)}</script>\n<script>{scripts}</script></body></html>\n'
    )


def below_panels(title: str, runs: list[Run]) -> str:
    """What a section has below its panels."""
    if title == "Loss":
        return evaluations(runs)
    if title == "Optimization":
        return notes(runs, skipped)
    if title == "Speed":
        return notes(runs, slowest)
    return _heat_maps(runs) if title == "Experts" else ""


def _json(data: dict) -> str:
    """As JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _figure(panel: dict, number: int) -> str:
    return (
        f'<figure class="panel{" wide" * panel["wide"]}" data-panel="{number}"><figcaption>'
        f"<h3>{escape(panel['title'])}</h3><p>{escape(panel['note'])}</p><div class=legend></div></figcaption>"
        "<div class=chart></div></figure>"
    )


def _heat_maps(runs: list[Run]) -> str:
    """The places that the script draws the experts' load into."""
    with_load = [(i, run) for i, run in enumerate(runs) if run.load.sums is not None]
    if not with_load:
        return ""
    names = "".join(f"<option value={i}>{escape(run.name)}</option>" for i, run in with_load)
    hidden = "" if len(runs) > 1 else " hidden"
    return (
        "<div class=grid>"
        "<figure class=load><figcaption><h3>Load, layer by expert</h3>"
        "<p>Tokens of an expert over the mean of its layer.</p></figcaption>"
        f"<div class=row><label{hidden}>run <select id=load-run>{names}</select></label>"
        "<label class=wide>time <input id=load-time type=range min=0 max=0 value=0></label></div>"
        "<p id=load-when class=when></p><canvas id=load-map role=img aria-label='Load, layer by expert'></canvas>"
        "<div class=scale><canvas id=load-scale></canvas></div></figure>"
        "<figure class=load><figcaption><h3>Load of one layer over time</h3>"
        "<p>Every expert of the layer, from the first step to the last.</p></figcaption>"
        "<div class=row><label>layer <select id=load-layer></select></label></div>"
        "<p id=load-note class=when></p>"
        "<canvas id=load-layer-map role=img aria-label='Load of one layer over time'></canvas></figure></div>"
    )


def _head(runs: list[Run]) -> str:
    figures = [facts(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd><small>{escape(small)}</small></div>"
                        for key, (value, small) in figures[0].items())
        return (f"<header><p class=kind>dstrain report</p><h1>{escape(runs[0].name)} {_pill(runs[0])}</h1>"
                f"<p class=what>{escape(_what(runs[0]))}</p><dl class=tiles>{tiles}</dl></header>")
    keys = list(dict.fromkeys(key for figure in figures for key in figure))
    rows = ""
    for i, (run, figure) in enumerate(zip(runs, figures)):
        cells = "".join(f"<td>{escape(figure.get(key, ('–', ''))[0])}</td>" for key in keys)
        rows += f"<tr><th scope=row>{_swatch(i)}{escape(run.name)}</th><td>{_pill(run)}</td>{cells}</tr>"
    heads = "".join(f"<th scope=col>{escape(key)}</th>" for key in ["run", "status", *keys])
    return (f"<header><p class=kind>dstrain report</p><h1>{len(runs)} runs</h1><div class=scroll><table>"
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></header>")


def _swatch(number: int) -> str:
    return f'<i class=swatch style="background:var(--c{number})"></i>'


def _pill(run: Run) -> str:
    status = run.status.get("status")
    if status not in STATUS:  # a run that goes on, and one that was killed
        status = "no status yet"
    return f'<span class="pill {status.split()[0]}">{status}</span>'


def _what(run: Run) -> str:
    """Model, precision and layout, and what ended the run."""
    parallel = [f"{key} {size}" for key in ("pp", "ep") if (size := run.setting("parallel", key)) not in (None, 1)]
    words = [f"model {run.setting('model', 'name')}" if run.config else "", run.setting("precision", "name"), *parallel,
             run.status.get("reason") or run.status.get("signal")]
    return " · ".join(str(word) for word in words if word)


def _controls(runs: list[Run]) -> str:
    if not any(run.steps for run in runs):
        return ""
    shown = "".join(f'<label><input type=checkbox checked data-run="{i}">{_swatch(i)}{escape(run.name)}</label>'
                    for i, run in enumerate(runs)) if len(runs) > 1 else ""
    points = "".join(f"<option value={n}>{words}</option>" for n, words in SMOOTHING.items())
    return (f"<nav>{shown}<label>smoothing <select id=smooth>{points}</select></label>"
            "<button id=whole hidden>whole run</button><span class=hint>drag across a chart to zoom in</span></nav>")


def _foot(runs: list[Run]) -> str:
    lines = []
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        if run.unreadable:
            lines.append(f"{run.name}: left out {', '.join(run.unreadable)}, which cannot be read.")
        if run.bins.width > 1:
            steps = f"{run.bins.width:,} steps"
            lines.append(f"A point of a line{of} is the mean of {steps}, the band around it their lowest and highest.")
    lines.append(f"Made by dstrain, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Nothing in this page is fetched.")
    return "<footer>" + "".join(f"<p>{escape(line)}</p>" for line in lines) + "</footer>"
