"""Phase times from a Chrome trace, as PyTorch's profiler writes it and as DeepSeek published one of a DualPipe pair.

A phase is an annotation of the host such as `attn(F)` or `dispatch(B)`. What it launched carries its correlation
number; a kernel's time counts for the phase in whose annotation its launch lies. A phase's time is the sum over its
kernels (the sum, also where two streams ran at once), the median over the layers.
"""

import gzip
import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dstrain.config.errors import InputError

NAMES = {"attn": "attention", "attention": "attention", "mlp": "experts", "experts": "experts",
         "dispatch": "dispatch", "combine": "combine"}
Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class TracedPair:
    """Milliseconds. phases: medians under names such as "attention F"."""

    phases: dict[str, float]
    span: float
    compute: float  # in which some computation ran
    communication: float
    hidden_fraction: float  # of communication, in which computation ran too


def read_trace(path: str | Path) -> TracedPair:
    """A .json or .json.gz file. Raises InputError where it is no trace with annotated phases."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a Chrome trace ({' '.join(str(error).split())})") from None
    ranges = sorted((e for e in events if e.get("cat") == "user_annotation" and _phase(e["name"])), key=_start)
    launches = {e["args"]["correlation"]: e for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    times = [0.0] * len(ranges)
    spans: dict[bool, Spans] = {True: [], False: []}
    begins = [_start(one) for one in ranges]
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        place = bisect_right(begins, _start(launch)) - 1 if launch else -1
        if place < 0 or _start(launch) > _end(ranges[place]):
            continue
        times[place] += kernel["dur"]
        spans[_phase(ranges[place]["name"])[0] in ("dispatch", "combine")].append((_start(kernel), _end(kernel)))
    if not any(times):
        raise InputError(f"{path}: no kernels inside annotations such as attn(F), dispatch(F), mlp(B)")
    by_phase: dict[str, list[float]] = {}
    for one, time in zip(ranges, times, strict=True):
        by_phase.setdefault(" ".join(_phase(one["name"])), []).append(time / 1e3)
    both = _length(spans[True]) + _length(spans[False]) - _length(spans[True] + spans[False])
    every = spans[True] + spans[False]
    return TracedPair(
        {name: median(values) for name, values in by_phase.items()},
        (max(end for _, end in every) - min(start for start, _ in every)) / 1e3,
        _length(spans[False]) / 1e3, _length(spans[True]) / 1e3, both / _length(spans[True]) if spans[True] else 1.0,
    )


def _phase(name: str) -> tuple[str, str] | None:
    """attn(F) -> attention, F."""
    head, _, part = name.partition("(")
    return (NAMES[head], part[:1]) if head in NAMES and part in ("F)", "B)", "W)") else None


def _start(event: dict) -> float:
    return event["ts"]


def _end(event: dict) -> float:
    return event["ts"] + event["dur"]


def _length(spans: Spans) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
