"""Metrics of a run of any length in bounded memory: bins of equally many steps, and the load of experts over time.

A run's length is not known while its file is read. Bins begin one step wide; where there would be more than the limit,
each pair becomes one. So a run ends with between limit / 2 and limit bins, or with a bin for every step of a short one.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

STARVING = 0.1  # of the mean load of the expert's layer
LONG_SHARE, LONG_STEPS = 0.05, 20  # for long: that share of the run's steps without a break, and so many at least


@dataclass
class Bin:
    """Numbers of one series in one bin."""

    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, other: "Bin") -> "Bin":
        return Bin(
            self.count + other.count, self.total + other.total, min(self.low, other.low), max(self.high, other.high)
        )


@dataclass
class Span:
    """The steps of one bin."""

    first_step: int
    last_step: int
    tokens: int  # consumed after the last of them
    steps: int

    def add(self, other: "Span") -> "Span":
        return Span(self.first_step, other.last_step, other.tokens, self.steps + other.steps)


@dataclass
class Bins:
    """Named series over the steps of a run. A series is None in bins that have no number of it."""

    limit: int  # even
    width: int = 1  # steps of a full bin
    spans: list[Span] = field(default_factory=list)
    series: dict[str, list[Bin | None]] = field(default_factory=dict)
    named: dict[str, list[Counter]] = field(default_factory=dict)  # of values that have no mean, such as a rank

    def add(self, step: int, tokens: int, numbers: dict[str, float], names: dict[str, int]) -> bool:
        """One step's numbers. -> whether pairs of bins have become one before it."""
        halved = len(self.spans) == self.limit and self.spans[-1].steps == self.width
        if halved:
            self.spans = [first.add(second) for first, second in zip(self.spans[::2], self.spans[1::2])]
            self.series = {name: _pairs(self._whole(bins), _both) for name, bins in self.series.items()}
            self.named = {
                name: _pairs(self._whole(counts, Counter), Counter.__add__) for name, counts in self.named.items()
            }
            self.width *= 2
        span = Span(step, step, tokens, 1)
        if self.spans and self.spans[-1].steps < self.width:
            self.spans[-1] = self.spans[-1].add(span)
        else:
            self.spans.append(span)
        for name, number in numbers.items():
            bins = self._open(self.series.setdefault(name, []))
            bins[-1] = _both(bins[-1], Bin(1, number, number, number))
        for name, value in names.items():
            self._open(self.named.setdefault(name, []), Counter)[-1][value] += 1
        return halved

    def _open(self, bins: list, empty=lambda: None) -> list:
        """`bins` as long as there are spans."""
        while len(bins) < len(self.spans):
            bins.append(empty())
        return bins

    def _whole(self, bins: list, empty=lambda: None) -> list:
        return bins + [empty() for _ in range(self.limit - len(bins))]


def _both(first: Bin | None, second: Bin | None) -> Bin | None:
    return first.add(second) if first and second else first or second


def _pairs(bins: list, join) -> list:
    return [join(first, second) for first, second in zip(bins[::2], bins[1::2])]


class LoadBins:
    """Load of every expert over the mean of its layer, averaged over each of at most `limit` bins of steps.

    Of a bin's steps at most `most` are looked at, evenly spaced, before bins are joined: nearly all of a line of
    metrics.jsonl is load, and a run of a hundred thousand steps has gigabytes. The first `limit * most` steps all are.
    """

    def __init__(self, limit: int = 128, most: int = 16):
        self.bins, self.most = Bins(limit), most
        self.sums: np.ndarray | None = None  # float32 [limit, MoE layers, experts], of load / mean load
        self.counts = np.zeros(limit, np.int64)  # steps in each sum
        self.shape: tuple[int, int] = (0, 0)

    def wants(self) -> bool:
        """Whether the load of the step that comes next is looked at."""
        last = self.bins.spans[-1].steps if self.bins.spans else 0
        return last % self.bins.width % max(1, self.bins.width // self.most) == 0

    def add(self, step: int, tokens: int, load: object) -> None:
        """load: a list per MoE layer of tokens per expert; anything else is no load, as where it was not looked at."""
        if self.bins.add(step, tokens, {}, {}) and self.sums is not None:
            half = len(self.counts) // 2
            for array in (self.sums, self.counts):
                array[:half] = array[::2] + array[1::2]
                array[half:] = 0
        shares = _shares(load)
        if shares is None:
            return
        if self.sums is None:
            self.shape = shares.shape
            self.sums = np.zeros((len(self.counts), *self.shape), np.float32)
        if shares.shape == self.shape:
            self.sums[len(self.bins.spans) - 1] += shares
            self.counts[len(self.bins.spans) - 1] += 1

    def frames(self, most: int) -> tuple[list[Span], np.ndarray]:
        """At most `most` pieces of the run -> their steps, and load over mean, float32 [pieces, layers, experts].

        NaN where no step of a piece was looked at.
        """
        spans = self.bins.spans
        size = -(-len(spans) // most) if spans else 1
        starts = range(0, len(spans), size)
        joined = []
        for start in starts:
            span = spans[start]
            for other in spans[start + 1 : start + size]:
                span = span.add(other)
            joined.append(span)
        if self.sums is None:
            return joined, np.zeros((len(joined), 0, 0), np.float32)
        sums = np.add.reduceat(self.sums[: len(spans)], list(starts), axis=0)
        counts = np.add.reduceat(self.counts[: len(spans)], list(starts))
        with np.errstate(invalid="ignore"):
            return joined, sums / counts[:, None, None].astype(np.float32)


@dataclass
class Starving:
    """An expert whose load was under STARVING of its layer's mean, in the mean of each bin, for long."""

    layer: int  # MoE layers, counted from 0
    expert: int
    first: Span
    last: Span
    steps: int
    share: float  # of the layer's mean load, over these steps
    lasts: bool  # to the end of what was read


def starving(load: LoadBins) -> list[Starving]:
    """Every stretch of steps in which an expert starved for long: those that last come first, then the longest."""
    spans, shares = load.frames(load.bins.limit)
    steps = np.array([span.steps for span in spans], np.int64)
    long = max(LONG_STEPS, LONG_SHARE * steps.sum())
    low = shares < STARVING  # NaN is not
    found = []
    for layer, expert in zip(*np.nonzero(low.any(0))):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], low[:, layer, expert], [False])).astype(np.int8)))
        for begin, end in zip(edges[::2], edges[1::2]):
            total = int(steps[begin:end].sum())
            if total >= long:
                share = float(np.average(shares[begin:end, layer, expert], weights=steps[begin:end]))
                ends = bool(end == len(spans))
                found.append(Starving(int(layer), int(expert), spans[begin], spans[end - 1], total, share, ends))
    return sorted(found, key=lambda one: (not one.lasts, -one.steps, one.layer, one.expert))


def _shares(load: object) -> np.ndarray | None:
    """Load over its layer's mean, float32 [layers, experts]; 1 in a layer without any."""
    if not isinstance(load, list) or not load:
        return None
    try:
        array = np.array(load, np.float64)
    except (TypeError, ValueError):  # not numbers, or layers of different sizes
        return None
    if array.ndim != 2 or array.shape[1] == 0 or not np.isfinite(array).all() or (array < 0).any():
        return None
    mean = array.mean(1, keepdims=True)
    return np.where(mean > 0, array / np.where(mean > 0, mean, 1), 1).astype(np.float32)
