"""What the report says in words: the figures at the top, tables, and notes under the charts. All text is escaped."""

import json
from collections.abc import Callable
from html import escape

from dstrain.telemetry.report_bins import LONG_SHARE, LONG_STEPS, STARVING, starving
from dstrain.telemetry.report_panels import layer_names
from dstrain.telemetry.report_read import FIRST_SKIPPED, Run

MOST_STARVING, MOST_EVALUATIONS = 24, 12  # rows of the tables


def table(head: list[str], rows: list[list[str]], kind: str = "") -> str:
    """Rows of text; it scrolls by itself where the window is narrow."""
    heads = "".join(f"<th scope=col>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f'<div class=scroll><table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(run: Run) -> dict[str, tuple[str, str]]:
    """The figures at the top: value, and a line below it."""
    found = {}
    target = run.setting("schedule", "tokens")
    known = isinstance(target, int | float) and target > 0
    found["tokens"] = tokens_words(run.tokens), f"{run.tokens / target:.1%} of {tokens_words(target)}" if known else ""
    rollbacks = f", {run.rollbacks:,} rollback{'s' * (run.rollbacks > 1)}" if run.rollbacks else ""
    found["steps"] = f"{run.steps:,}", f"{run.skipped:,} skipped{rollbacks}"
    if run.recent:
        found["loss"] = f"{sum(run.recent) / len(run.recent):.4f}", f"mean of {len(run.recent)} steps"
    if run.evaluations and run.evaluations[-1]["loss"] is not None:
        last = run.evaluations[-1]
        found["held-out loss"] = f"{last['loss']:.4f}", f"after step {last['step']:,}"
        if last["bits_per_byte"] is not None:
            text = "the whole text" if last["whole"] else "a part of the text"
            found["bits per byte"] = f"{last['bits_per_byte']:.4f}", text
    if run.seconds > 0:
        found["time in steps"] = duration_words(run.seconds), f"{run.seconds / run.steps:.3g} s a step"
    speed, mfu = (median(run, name) for name in ("tokens_per_second", "mfu"))
    if speed is not None:
        found["tokens/s"] = f"{speed:,.0f}", "median"
    if mfu is not None:
        found["MFU"] = f"{mfu:.1%}", "median"
    return found


def median(run: Run, name: str) -> float | None:
    """Of the means of the bins."""
    means = sorted(bin.mean for bin in run.bins.series.get(name, []) if bin)
    return means[len(means) // 2] if means else None


def notes(runs: list[Run], of: Callable[[Run], str]) -> str:
    """of(run) -> HTML; under the run's name where there are several."""
    found = [(run, html) for run in runs if (html := of(run))]
    return "".join((f"<h4>{escape(run.name)}</h4>" if len(runs) > 1 else "") + html for run, html in found)


def skipped(run: Run) -> str:
    if not run.skipped:
        return ""
    listed = ", ".join(f"{step:,} ({why})" for step, why in run.first_skipped)
    more = f" and {run.skipped - FIRST_SKIPPED:,} later ones" if run.skipped > FIRST_SKIPPED else ""
    return f"<p class=note>Skipped steps: {escape(listed)}{more}.</p>"


def slowest(run: Run) -> str:
    total = sum(run.slowest.values())
    named = ", ".join(f"rank {rank} in {count / total:.1%}" for rank, count in run.slowest.most_common(3))
    return f"<p class=note>Slowest most often: {named} of the steps.</p>" if total else ""


def starving_card(runs: list[Run]) -> str:
    """A card beside the panels of the experts."""
    if all(run.load.sums is None for run in runs):
        return ""
    return (
        f"<figure><figcaption><h3>Starving experts</h3><p>Load under {STARVING:g} of the layer's mean for long: over "
        f"{LONG_SHARE:.0%} of the steps, and {LONG_STEPS} at least, without a break.</p>{notes(runs, _starving)}"
        "</figcaption></figure>"
    )


def _starving(run: Run) -> str:
    if run.load.sums is None:
        return ""
    found = starving(run.load)
    if not found:
        return "<p class=note>None.</p>"
    names, last = layer_names(run, run.load.shape[0]), sum(one.lasts for one in found)
    more = f" {MOST_STARVING} of them:" if len(found) > MOST_STARVING else ""
    rows = []
    for one in found[:MOST_STARVING]:
        end = "the end" if one.lasts else f"{one.last.last_step:,}"
        rows.append([names[one.layer], str(one.expert), f"{one.share:.3f}", f"{one.first.first_step:,} to {end}"])
    words = f"<p class=note>{len(found):,} found, {last or 'none'} of them still at the end.{more}</p>"
    return words + table(["layer", "expert", "load / mean", "steps"], rows)


def evaluations(runs: list[Run]) -> str:
    """The last evaluations of every run, to be opened."""
    tables = notes(runs, _evaluations)
    return f"<details><summary>Evaluations</summary>{tables}</details>" if tables else ""


def _evaluations(run: Run) -> str:
    if not run.evaluations:
        return ""
    depths = max(len(record["loss_mtp"]) for record in run.evaluations)
    shown, rows = run.evaluations[-MOST_EVALUATIONS:], []
    for record in reversed(shown):
        mtp = record["loss_mtp"] + [None] * (depths - len(record["loss_mtp"]))
        numbers = [record["loss"], *mtp, record["bits_per_byte"]]
        tokens = "" if record["heldout_tokens"] is None else f", {record['heldout_tokens']:,.0f} tokens"
        rows.append([
            f"{record['step']:,}", "–" if record["tokens"] is None else tokens_words(record["tokens"]),
            *("–" if value is None else f"{value:.4f}" for value in numbers),
            ("the whole" if record["whole"] else "a part") + tokens,
        ])
    more = len(run.evaluations) - len(shown)
    words = f"<p class=note>The last {MOST_EVALUATIONS} of {len(run.evaluations):,}.</p>" if more else ""
    depth_words = [f"MTP {depth + 1}" for depth in range(depths)]
    return words + table(["step", "tokens", "loss", *depth_words, "bits per byte", "held-out text"], rows)


def settings(runs: list[Run]) -> str:
    """The configuration, to be opened; of several runs what differs."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys, several = list(dict.fromkeys(key for values in flat for key in values)), len(runs) > 1
    if several:
        keys = [key for key in keys if len({values.get(key, "–") for values in flat}) > 1]
    if not keys:
        return ""
    rows = [[key, *(values.get(key, "–") for values in flat)] for key in keys]
    words = "Settings that differ" if several else "Configuration"
    shown = table(["", *(run.name for run in runs)] if several else [], rows, "settings")
    return f"<section><details{' open' * several}><summary>{words}</summary>{shown}</details></section>"


def _flat(value: object, where: str = "") -> list[tuple[str, str]]:
    """Dotted keys and values as text; a list is a value."""
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{where}.{key}" if where else str(key))]
    return [(where, json.dumps(value, ensure_ascii=False, default=str))] if where else []


def tokens_words(tokens: float) -> str:
    """A number of tokens as 650.2K or 14.8T."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.4g}{letter}"
    return f"{tokens:g}"


def duration_words(seconds: float) -> str:
    """3.25 s, 4.1 min or 12 h 30 min."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours:,} h {minutes:02} min"
