"""What the report draws: panels in sections, and each run's numbers as plain containers for the page's script.

A panel is drawn where some run has a number for it; a run without evaluations, experts or a mixture has fewer panels.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dstrain.telemetry.report_bins import Bins, LoadBins
from dstrain.telemetry.report_read import Run

CELLS = 600_000  # of the heat maps of all runs together, a byte each
FEWEST_FRAMES = 4  # of a heat map, however many experts there are
DIGITS = 6  # significant ones of every number in the page


@dataclass
class Panel:
    """One chart. Series and their labels; `name.*` stands for every series that begins so, labelled with the rest."""

    title: str
    note: str
    series: list[tuple[str, str]]
    points: list[tuple[str, str]] = field(default_factory=list)  # of the evaluations
    log: bool = False  # the vertical axis
    zero: bool = False  # the vertical axis begins at 0
    percent: bool = False
    dots: bool = False  # values that no line may join
    skipped: bool = False  # skipped steps are marked
    settled: bool = False  # the vertical axis is chosen for what comes after the first twentieth of the tokens
    wide: bool = False


SECTIONS = [
    ("Loss", [
        Panel("Main loss", "Cross-entropy per token over the global batch; dots are evaluations of held-out text.",
              [("loss_main", "training")], [("loss", "held out")], skipped=True, settled=True, wide=True),
        Panel("MTP losses", "Unweighted, one line a depth; dots are evaluations.",
              [("loss_mtp.*", "depth {n}")], [("loss_mtp.*", "depth {n}, held out")], settled=True),
        Panel("Balance loss", "Sequence-wise, summed over MoE layers, before its coefficient.",
              [("loss_balance", "balance")]),
        Panel("Held-out accuracy", "How often the likeliest token is the right one.", [],
              [("accuracy", "main"), ("accuracy_mtp.*", "depth {n}")], percent=True),
        Panel("Bits per byte", "Of the held-out text: comparable between tokenizers.", [],
              [("bits_per_byte", "bits per byte")], settled=True),
    ]),
    ("Optimization", [
        Panel("Gradient norm", "Before clipping. Red marks are skipped steps.", [("grad_norm", "gradient norm")],
              log=True, skipped=True),
        Panel("Learning rate", "What the step used.", [("lr", "learning rate")], zero=True),
        Panel("Bias speed", "How far a routing bias moves in a step (γ).", [("bias_speed", "bias speed")], zero=True),
        Panel("MTP weight", "Of the mean MTP loss in the whole loss (λ).", [("mtp_weight", "MTP weight")], zero=True),
        Panel("Batch", "Sequences of the global batch.", [("batch_sequences", "sequences")], zero=True),
    ]),
    ("Speed", [
        Panel("Tokens per second", "Of all ranks together.", [("tokens_per_second", "tokens per second")], zero=True),
        Panel("Model FLOPs utilization", "Of the devices' peak, without recomputation.", [("mfu", "MFU")], zero=True,
              percent=True),
        Panel("Spread of step times", "How much longer the slowest rank works than the median, waiting left out.",
              [("step_time_spread", "spread")], zero=True, percent=True),
        Panel("Slowest rank", "The one that was slowest most often.", [("slowest_rank", "rank")], zero=True, dots=True),
        Panel("Token dispatch", "Bytes a step that all ranks sent to experts and back.",
              [("dispatch_slow_bytes", "between nodes"), ("dispatch_fast_bytes", "inside nodes")], zero=True),
    ]),
    ("Experts", [
        Panel("Maximal violation", "The fullest expert's load over its layer's mean, less 1, in a step's worst layer.",
              [("moe_max_violation", "maximal violation")], zero=True, wide=True),
    ]),
    ("Data", [
        Panel("Shares of the sources", "Of the latest samples.", [("data_shares.*", "{n}")], zero=True, percent=True),
        Panel("Shares of the tasks", "Of the latest samples.", [("data_task_shares.*", "{n}")], zero=True,
              percent=True),
        Panel("Epochs", "How often each source has been read.", [("data_epochs.*", "{n}")], zero=True),
    ]),
]


def sections(runs: list[Run]) -> list[tuple[str, list[dict]]]:
    """Title and drawable panels of every section, patterns filled in; a section without panels is there too."""
    return [(title, [drawn for panel in panels if (drawn := _drawn(panel, runs))]) for title, panels in SECTIONS]


def _drawn(panel: Panel, runs: list[Run]) -> dict | None:
    lines = {name: None for run in runs for name, bins in _lines(run).items() if any(mean is not None for mean in bins)}
    points = {name: None for run in runs for record in run.evaluations for name, value in _points(record).items()
              if value is not None}
    series, dots = list(_matching(panel.series, list(lines))), list(_matching(panel.points, list(points)))
    if not series and not dots:
        return None
    return {
        "title": panel.title, "note": panel.note, "series": series, "points": dots,
        **{key: getattr(panel, key) for key in ("log", "zero", "percent", "dots", "skipped", "settled", "wide")},
    }


def _matching(patterns: list[tuple[str, str]], names: list[str]) -> Iterator[tuple[str, str]]:
    for pattern, label in patterns:
        begin = pattern.removesuffix("*")
        for name in names:
            if name == pattern or begin != pattern and name.startswith(begin):
                part = name[len(begin) :]
                # depths are counted from 1
                yield name, label.replace("{n}", str(int(part) + 1) if begin.endswith("_mtp.") else part)


def _lines(run: Run) -> dict[str, list[float | None]]:
    """The value of every series in every bin."""
    bins = run.bins
    names = [name for name in bins.series if name != "skipped"]
    found = {name: [rounded(bin.mean) if bin else None for bin in _padded(bins, bins.series[name])] for name in names}
    for name, counters in bins.named.items():
        counters = counters + [None] * (len(bins.spans) - len(counters))
        found[name] = [counter.most_common(1)[0][0] if counter else None for counter in counters]
    return found


def _points(record: dict) -> dict[str, float | None]:
    return {key: record[key] for key in ("loss", "accuracy", "bits_per_byte")} | {
        f"{key}.{depth}": value for key in ("loss_mtp", "accuracy_mtp") for depth, value in enumerate(record[key])
    }


def _padded(bins: Bins, series: list) -> list:
    return series + [None] * (len(bins.spans) - len(series))


def run_data(run: Run, cells: int) -> dict:
    """A run's numbers for the script; cells: of its heat maps, in bytes.

    Bins: steps from `first` to `last`, `tokens` consumed after them; for each series `mean`, and where bins have more
    than one step `low` and `high`.
    """
    bins = run.bins
    ranges = {}
    if bins.width > 1:
        for name, series in bins.series.items():
            whole = _padded(bins, series)
            ranges[name] = {
                "low": [rounded(bin.low) if bin else None for bin in whole],
                "high": [rounded(bin.high) if bin else None for bin in whole],
            }
    skipped = [int(bin.total) if bin else 0 for bin in _padded(bins, bins.series.get("skipped", []))]
    return {
        "name": run.name,
        "width": bins.width,
        "first": [span.first_step for span in bins.spans],
        "last": [span.last_step for span in bins.spans],
        "tokens": [span.tokens for span in bins.spans],
        "skipped": skipped,
        "series": {name: {"mean": values, **ranges.get(name, {})} for name, values in _lines(run).items()},
        "evaluations": [
            {"step": record["step"], "tokens": record["tokens"], "whole": record["whole"],
             **{name: None if value is None else rounded(value) for name, value in _points(record).items()}}
            for record in run.evaluations if record["tokens"] is not None
        ],
        "load": load_data(run, cells),
    }


def load_data(run: Run, cells: int) -> dict | None:
    """The heat maps' cube, None where there is none.

    `codes` is base64 of one byte per piece, layer and expert: 160 + 24 log2(load / mean of the layer), held in 1 … 255,
    a hundredth to fifteen times the mean in steps of 2.9 %; 0 where nothing is known.
    """
    load: LoadBins = run.load
    if load.sums is None:
        return None
    layers, experts = load.shape
    spans, shares = load.frames(max(FEWEST_FRAMES, cells // (layers * experts)))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.rint(160 + 24 * np.log2(shares)), 1, 255)
    codes = np.where(np.isnan(shares), 0, codes).astype(np.uint8)
    return {
        "layers": layer_names(run, layers), "experts": experts, "first": [span.first_step for span in spans],
        "last": [span.last_step for span in spans], "tokens": [span.tokens for span in spans],
        "codes": base64.b64encode(codes.tobytes()).decode(),
        "looked_at": int(load.counts.sum()), "steps": sum(span.steps for span in spans),
    }


def layer_names(run: Run, count: int) -> list[str]:
    """The names of MoE layers, those of MTP modules last: the number in the names of their weights."""
    dense, layers = run.setting("model", "first_k_dense_replace"), run.setting("model", "num_hidden_layers")
    depth = run.setting("model", "num_nextn_predict_layers")
    if all(isinstance(value, int) for value in (dense, layers, depth)) and layers - dense + depth == count:
        return [str(i) for i in range(dense, layers)] + [f"{layers + k} (MTP {k + 1})" for k in range(depth)]
    return [f"MoE {i}" for i in range(count)]


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")

