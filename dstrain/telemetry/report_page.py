"""The report as one HTML page: style, script and numbers in it, nothing fetched.

Everything that comes from a run is text, escaped here; the script puts text in as text and never as HTML.
"""

import json
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from dstrain.telemetry.report_bins import LONG_SHARE, LONG_STEPS, STARVING, Starving, starving
from dstrain.telemetry.report_panels import CELLS, layer_names, run_data, sections
from dstrain.telemetry.report_read import FIRST_SKIPPED, Run

MOST_STARVING, MOST_EVALUATIONS = 24, 12  # rows of the tables
FILES = Path(__file__).resolve().parent
# The browser itself makes sure that nothing is fetched.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(runs: list[Run]) -> str:
    """The whole page of one run, or of several laid over each other. Names of runs differ."""
    charts, parts = [], []
    for title, panels in sections(runs):
        extra = EXTRAS.get(title, lambda runs: "")(runs)
        if panels or extra:
            drawn = "".join(_figure(panel, len(charts) + i) for i, panel in enumerate(panels))
            drawn += CARDS.get(title, lambda runs: "")(runs)
            charts += panels
            parts.append(f"<section><h2>{title}</h2><div class=grid>{drawn}</div>{extra}</section>")
    if not any(run.steps for run in runs):
        parts.append("<section><p class=empty>No step has been taken yet.</p></section>")
    data = {"panels": charts, "runs": [run_data(run, CELLS // len(runs)) for run in runs]}
    title = escape(", ".join(run.name for run in runs))
    scripts = "".join((FILES / name).read_text(encoding="utf-8") for name in ("report_charts.js", "report_load.js"))
    return (
        f'<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><title>{title} – dstrain</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1"><meta name=color-scheme content="light dark">\n'
        f'<link rel=icon href="data:,"><style>{(FILES / "report.css").read_text(encoding="utf-8")}</style></head>\n'
        f"<body><main>{_head(runs)}{_controls(runs)}{''.join(parts)}{_settings(runs)}{_foot(runs)}</main>"
        '<div id=tip hidden></div><noscript><p class=empty>The charts need JavaScript.</p></noscript>\n'
        f'<script type="application/json" id=numbers>{_json(data)}</script>\n<script>{scripts}</script></body></html>\n'
    )


def _json(data: dict) -> str:
    """As JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _figure(panel: dict, number: int) -> str:
    return (
        f'<figure class="panel{" wide" * panel["wide"]}" data-panel="{number}"><figcaption><h3>{escape(panel["title"])}</h3>'
        f'<p>{escape(panel["note"])}</p><div class=legend></div></figcaption><div class=chart></div></figure>'
    )


def _head(runs: list[Run]) -> str:
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd><small>{escape(small)}</small></div>"
                        for key, (value, small) in facts[0].items())
        return (f"<header><p class=kind>dstrain report</p><h1>{escape(runs[0].name)} {_pill(runs[0])}</h1>"
                f"<p class=what>{escape(_what(runs[0]))}</p><dl class=tiles>{tiles}</dl></header>")
    keys = list(dict.fromkeys(key for fact in facts for key in fact))
    rows = "".join(
        f'<tr><th scope=row><i class=swatch style="background:var(--c{i % 10})"></i>{escape(run.name)}</th>'
        f"<td>{_pill(run)}</td>" + "".join(f"<td>{escape(fact.get(key, ('–', ''))[0])}</td>" for key in keys) + "</tr>"
        for i, (run, fact) in enumerate(zip(runs, facts))
    )
    head = "".join(f"<th scope=col>{escape(key)}</th>" for key in keys)
    return (f"<header><p class=kind>dstrain report</p><h1>{len(runs)} runs</h1><div class=scroll><table><thead><tr>"
            f"<th scope=col>run</th><th scope=col>status</th>{head}</tr></thead><tbody>{rows}</tbody></table></div></header>")


def _pill(run: Run) -> str:
    status = run.status.get("status")
    if status not in ("finished", "interrupted", "failed"):  # a run that goes on, and one that was killed
        status = "no status yet"
    return f'<span class="pill {status.split()[0]}">{status}</span>'


def _what(run: Run) -> str:
    """Model, precision and layout, and what ended the run."""
    parallel = [f"{key} {run.setting('parallel', key)}" for key in ("pp", "ep")
                if run.setting("parallel", key) not in (None, 1)]
    words = [f"model {run.setting('model', 'name')}" if run.config else "", str(run.setting("precision", "name") or ""),
             *parallel, str(run.status.get("reason") or run.status.get("signal") or "")]
    return " · ".join(word for word in words if word)


def _facts(run: Run) -> dict[str, tuple[str, str]]:
    """The figures at the top: value, and a line below it."""
    facts = {}
    target = run.setting("schedule", "tokens")
    done = f"{run.tokens / target:.1%} of {tokens_words(target)}" if isinstance(target, int | float) and target > 0 else ""
    facts["tokens"] = tokens_words(run.tokens), done
    facts["steps"] = f"{run.steps:,}", f"{run.skipped:,} skipped" + (f", {run.rollbacks} rollbacks" * bool(run.rollbacks))
    if run.recent:
        facts["loss"] = f"{sum(run.recent) / len(run.recent):.4f}", f"mean of {len(run.recent)} steps"
    if run.evaluations and run.evaluations[-1]["loss"] is not None:
        last = run.evaluations[-1]
        facts["held-out loss"] = f"{last['loss']:.4f}", f"after step {last['step']:,}"
        if last["bits_per_byte"] is not None:
            facts["bits per byte"] = f"{last['bits_per_byte']:.4f}", "the whole text" if last["whole"] else "a part of it"
    if run.seconds > 0:
        facts["time in steps"] = duration_words(run.seconds), f"{run.seconds / run.steps:.3g} s a step"
    speed = _median(run, "tokens_per_second")
    if speed is not None:
        facts["tokens/s"] = f"{speed:,.0f}", "median"
    mfu = _median(run, "mfu")
    if mfu is not None:
        facts["MFU"] = f"{mfu:.1%}", "median"
    return facts


def _median(run: Run, name: str) -> float | None:
    means = sorted(bin.mean for bin in run.bins.series.get(name, []) if bin)
    return means[len(means) // 2] if means else None


def _controls(runs: list[Run]) -> str:
    if not any(run.steps for run in runs):
        return ""
    legend = "".join(
        f'<label><input type=checkbox checked data-run="{i}"><i class=swatch style="background:var(--c{i % 10})"></i>'
        f"{escape(run.name)}</label>" for i, run in enumerate(runs)
    ) if len(runs) > 1 else ""
    windows = "".join(f"<option value={n}>{words}</option>" for n, words in
                      [(1, "off"), (5, "5 points"), (15, "15 points"), (51, "51 points")])
    return (f'<nav>{legend}<label>smoothing <select id=smooth>{windows}</select></label>'
            "<button id=whole hidden>whole run</button><span class=hint>drag across a chart to zoom in</span></nav>")


def _notes(runs: list[Run], of) -> str:
    """of(run) -> HTML; under the run's name where there are several."""
    found = [(run, html) for run in runs if (html := of(run))]
    return "".join((f"<h4>{escape(run.name)}</h4>" if len(runs) > 1 else "") + html for run, html in found)


def _skipped(run: Run) -> str:
    if not run.skipped:
        return ""
    listed = ", ".join(f"{step:,} ({why})" for step, why in run.first_skipped)
    more = f" and {run.skipped - FIRST_SKIPPED:,} later ones" if run.skipped > FIRST_SKIPPED else ""
    return f"<p class=note>Skipped steps: {escape(listed)}{more}.</p>"


def _slowest(run: Run) -> str:
    total = sum(run.slowest.values())
    named = ", ".join(f"rank {rank} in {count / total:.1%}" for rank, count in run.slowest.most_common(3))
    return f"<p class=note>Slowest most often: {named} of the steps.</p>" if total else ""


def _experts(runs: list[Run]) -> str:
    if all(run.load.sums is None for run in runs):
        return ""
    names = "".join(f"<option value={i}>{escape(run.name)}</option>" for i, run in enumerate(runs) if run.load.sums is not None)
    several = len(runs) > 1
    chooser = f"<label{'' if several else ' hidden'}>run <select id=load-run>{names}</select></label>"
    return (
        "<div class=grid><figure class=load><figcaption><h3>Load, layer by expert</h3>"
        "<p>Tokens of an expert over the mean of its layer.</p></figcaption>"
        f"<div class=row>{chooser}<label class=wide>time <input id=load-time type=range min=0 max=0 value=0></label></div>"
        "<p id=load-when class=when></p><canvas id=load-map role=img aria-label='Load, layer by expert'></canvas>"
        "<div class=scale><canvas id=load-scale></canvas></div></figure>"
        "<figure class=load><figcaption><h3>Load of one layer over time</h3><p>Every expert of the layer, from the first step to "
        "the last.</p></figcaption><div class=row><label>layer <select id=load-layer></select></label></div>"
        "<p id=load-note class=when></p><canvas id=load-layer-map role=img aria-label='Load of one layer over time'></canvas>"
        "</figure></div>"
    )


def _starving_card(runs: list[Run]) -> str:
    if all(run.load.sums is None for run in runs):
        return ""
    return (
        f"<figure><figcaption><h3>Starving experts</h3><p>Load under {STARVING:g} of the layer's mean for long: over "
        f"{LONG_SHARE:.0%} of the steps, and {LONG_STEPS} at least, without a break.</p>{_notes(runs, _starving)}</figcaption></figure>"
    )


def _starving(run: Run) -> str:
    if run.load.sums is None:
        return ""
    found = starving(run.load)
    if not found:
        return "<p class=note>None.</p>"
    names = layer_names(run, run.load.shape[0])
    last = sum(one.lasts for one in found)
    more = f" {MOST_STARVING} of them:" if len(found) > MOST_STARVING else ""
    rows = "".join(_starving_row(one, names) for one in found[:MOST_STARVING])
    return (f"<p class=note>{len(found):,} found, {last or 'none'} of them still at the end.{more}</p><div class=scroll>"
            "<table><thead><tr><th scope=col>layer<th scope=col>expert<th scope=col>load / mean<th scope=col>steps</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>")


def _starving_row(one: Starving, names: list[str]) -> str:
    end = "the end" if one.lasts else f"{one.last.last_step:,}"
    return (f"<tr><td>{escape(names[one.layer])}<td>{one.expert}<td>{one.share:.3f}<td>{one.first.first_step:,} to {end}</tr>")


def _evaluations(run: Run) -> str:
    if not run.evaluations:
        return ""
    depths = max(len(record["loss_mtp"]) for record in run.evaluations)
    shown = run.evaluations[-MOST_EVALUATIONS:]

    def cell(value: float | None) -> str:
        return "<td>–" if value is None else f"<td>{value:.4f}"

    rows = ""
    for record in reversed(shown):
        mtp = record["loss_mtp"] + [None] * (depths - len(record["loss_mtp"]))
        text = "the whole" if record["whole"] else "a part"
        tokens = "" if record["heldout_tokens"] is None else f", {record['heldout_tokens']:,.0f} tokens"
        rows += (f"<tr><td>{record['step']:,}<td>{tokens_words(record['tokens'] or 0)}{cell(record['loss'])}"
                 + "".join(map(cell, mtp)) + cell(record["bits_per_byte"]) + f"<td>{text}{tokens}</tr>")
    more = f"<p class=note>The last {MOST_EVALUATIONS} of {len(run.evaluations):,}.</p>" * (len(run.evaluations) > len(shown))
    head = ["step", "tokens", "loss", *(f"MTP {k + 1}" for k in range(depths)), "bits per byte", "held-out text"]
    return (f"{more}<div class=scroll><table><thead><tr>{''.join(f'<th scope=col>{word}' for word in head)}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>")


def _evaluation_tables(runs: list[Run]) -> str:
    tables = _notes(runs, _evaluations)
    return f"<details><summary>Evaluations</summary>{tables}</details>" if tables else ""


CARDS = {"Experts": _starving_card}  # beside a section's panels, and below them
EXTRAS = {
    "Loss": _evaluation_tables,
    "Optimization": lambda runs: _notes(runs, _skipped),
    "Speed": lambda runs: _notes(runs, _slowest),
    "Experts": _experts,
}


def _settings(runs: list[Run]) -> str:
    """The configuration; of several runs what differs."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    words = "Configuration"
    if len(runs) > 1:
        keys, words = [key for key in keys if len({settings.get(key, "–") for settings in flat}) > 1], "Settings that differ"
    if not keys:
        return ""
    rows = "".join(f"<tr><th scope=row>{escape(key)}</th>" + "".join(f"<td>{escape(s.get(key, '–'))}" for s in flat) + "</tr>"
                   for key in keys)
    head = f"<thead><tr><th>{''.join(f'<th scope=col>{escape(run.name)}' for run in runs)}</tr></thead>" * (len(runs) > 1)
    return (f"<section><details{' open' * (len(runs) > 1)}><summary>{words}</summary><div class=scroll><table class=settings>"
            f"{head}<tbody>{rows}</tbody></table></div></details></section>")


def _flat(value: object, where: str = "") -> list[tuple[str, str]]:
    """Dotted keys and values as text; a list is a value."""
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{where}.{key}" if where else str(key))]
    return [(where, json.dumps(value, ensure_ascii=False, default=str))] if where else []


def _foot(runs: list[Run]) -> str:
    lines = [f"{run.name}: left out {', '.join(run.unreadable)}, which cannot be read." for run in runs if run.unreadable]
    widths = sorted({run.bins.width for run in runs if run.steps})
    binned = " and ".join(f"{width:,}" for width in widths)
    if widths and widths[-1] > 1:
        lines.append(f"A point of a line is the mean of {binned} steps, the band around it their lowest and highest value.")
    lines.append(f"Made by dstrain, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Nothing in this page is fetched from anywhere.")
    return "<footer>" + "".join(f"<p>{escape(line)}</p>" for line in lines) + "</footer>"


def tokens_words(tokens: float) -> str:
    """A number of tokens as 650.2K or 14.8T."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{letter}"
    return f"{tokens:g}"


def duration_words(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = int(seconds) // 60
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"
