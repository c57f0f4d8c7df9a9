"""A mixture: several sources, each with its own order and epochs, sharing the samples by shares that may change.

Sample n belongs to the source in whose interval of [0, 1) the number u(n) = n·φ mod 1 falls (φ the golden ratio, in
64-bit integers; the lengths of the intervals are the shares). The multiples of φ lie so evenly that any window of samples
holds its shares up to a few samples, and how many of the first n numbers lie in an interval is known in closed form, so
that nothing is remembered: a sample's number within its source is a function of n.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

import numpy as np
import torch

from dstrain.config.errors import InputError
from dstrain.config.schedule import Schedule
from dstrain.config.schema import SourceConfig, TrainConfig
from dstrain.data.corpus import Corpus
from dstrain.data.fim import FillInTheMiddle
from dstrain.data.indexed import IndexedDataset
from dstrain.data.samples import SampleStream, mix, stacked
from dstrain.data.sources import stable_hash
from dstrain.data.tokenizer import Tokenizer

RANGE = 2**64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / 1.618…, odd
STEPS = 256  # a share on a slope moves in that many steps
WINDOW = 4096  # samples over which realised shares are reported


def open_stream(config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer) -> "SampleStream | Mixture":
    """The training samples that a configuration and its corpus mean."""
    data, depth, seed = config.data, config.model.num_nextn_predict_layers, config.run.seed

    def stream(prefix: str, seed: int, rate: float) -> SampleStream:
        dataset = IndexedDataset(prefix)
        epochs = FillInTheMiddle(dataset, seed, rate, tokenizer) if rate else None
        return SampleStream(dataset, seed, data.sequence_length, depth, epochs)

    if data.sources is None:
        return stream(corpus.train, seed, data.fim_rate)
    streams = []
    for source, prefix in zip(data.sources, corpus.sources):
        rate = data.fim_rate if source.fim_rate is None else source.fim_rate
        # A source's order depends on its own name: adding one changes no other.
        streams.append(stream(prefix, mix(seed % RANGE ^ stable_hash(source.label)), rate))
    shares = share_pieces(data.sources, config.schedule.tokens, data.sequence_length)
    return Mixture(data.sources, streams, Turns(shares, seed))


def share_pieces(
    sources: list[SourceConfig], total_tokens: float, sequence_length: int
) -> list[tuple[int, list[float]]]:
    """(first sample, share of each source) of every stretch of constant shares.

    A schedule counts tokens; sample n begins after n * sequence_length of them. A slope becomes STEPS stretches.
    """
    schedules = [Schedule(source.schedule, total_tokens, start=source.share) for source in sources]
    ends = {0}
    for schedule in schedules:
        begin = 0.0
        for piece in schedule.pieces:
            steps, length = 1 if piece.shape == "constant" else STEPS, piece.until - begin
            ends |= {math.ceil((begin + length * i / steps) / sequence_length) for i in range(1, steps + 1)}
            begin = piece.until
    starts = sorted(ends)
    pieces = []
    for first, following in zip(starts, [*starts[1:], starts[-1] + 1]):
        tokens = (first + following - 1) // 2 * sequence_length  # of the stretch's middle sample
        pieces.append((first, [schedule(tokens) for schedule in schedules]))
    return pieces


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Σ over i = 0 … n - 1 of floor((a·i + b) / m), by Euclid's algorithm on (a, m)."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        n, b = divmod(a % m * n + b % m, m)
        m, a = a % m, m
    return total


class Turns:
    """Whose turn sample n = 0, 1, … is: a pure function of the pieces of shares, the seed and n."""

    def __init__(self, pieces: list[tuple[int, list[float]]], seed: int):
        """pieces: (first sample, share of each source), the first from 0 on. InputError where all shares are 0."""
        self.offset = mix(seed % RANGE)
        self.starts = [first for first, _ in pieces]
        self.bounds = [self._bounds(first, shares) for first, shares in pieces]
        self.before = [[0] * len(pieces[0][1])]  # samples of each source before a piece
        for piece, end in enumerate(self.starts[1:]):
            self.before.append(self._counts(piece, end))

    def _bounds(self, first: int, shares: list[float]) -> list[int]:
        """Where the sources' intervals of 0 … 2^64 begin, and the end of the last."""
        total = sum(map(Fraction, shares))
        if not total:
            raise InputError(f"data.sources: all shares are 0 from sample {first} on; at least one must be above")
        sums = accumulate(map(Fraction, shares), initial=Fraction(0))
        return [round(RANGE * part / total) for part in sums]

    def source(self, n: int) -> int:
        """The source of sample n."""
        piece = bisect_right(self.starts, n) - 1
        return bisect_right(self.bounds[piece], (n * GOLDEN + self.offset) % RANGE) - 1

    def counts(self, n: int) -> list[int]:
        """How many of the samples 0 … n - 1 each source has."""
        return self._counts(max(bisect_right(self.starts, n) - 1, 0), n)

    def _counts(self, piece: int, n: int) -> list[int]:
        first = self.starts[piece]
        below = [self._below(n, bound) - self._below(first, bound) for bound in self.bounds[piece]]
        return [old + high - low for old, low, high in zip(self.before[piece], below, below[1:])]

    def _below(self, n: int, bound: int) -> int:
        """How many of u(0) … u(n - 1) are below `bound`: floor(v / R) - floor((v - bound) / R) is 1 for those alone."""
        shifted = floor_sum(n, RANGE, GOLDEN, self.offset + RANGE - bound)
        return n + floor_sum(n, RANGE, GOLDEN, self.offset) - shifted


class Mixture:
    """The endless stream of a mixture's samples. `sample(n)` is a pure function of (sources, seed, n)."""

    def __init__(self, sources: list[SourceConfig], streams: list[SampleStream], turns: Turns):
        self.sources, self.streams, self.turns, self.width = sources, streams, turns, streams[0].width

    def place(self, n: int) -> tuple[int, int]:
        """The source of sample n, and the number of the visit to it."""
        source = self.turns.source(n)
        return source, self.turns.counts(n)[source]

    def sample(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample n: token ids, and each token's document within the sample; int64 [L + 1 + D] both."""
        if n < 0:
            raise IndexError(f"sample {n}: samples are counted from 0")
        return self._visit(*self.place(n))

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples first … first + count - 1: tokens and document numbers, both int64 [count, L + 1 + D]."""
        return stacked(self._following(first, count), count, self.width)

    def _following(self, first: int, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        visits = self.turns.counts(first)
        for n in range(first, first + count):
            source = self.turns.source(n)
            yield self._visit(source, visits[source])
            visits[source] += 1

    def _visit(self, source: int, visit: int) -> tuple[np.ndarray, np.ndarray]:
        stream = self.streams[source]
        return stream.sample(stream.visited(visit))

    def metrics(self, samples: int) -> dict:
        """After so many samples: shares of the last WINDOW, by source and by task, and epochs read of each source."""
        counts, first = self.turns.counts(samples), max(samples - WINDOW, 0)
        latest = [count - earlier for count, earlier in zip(counts, self.turns.counts(first))]
        shares = {source.label: count / max(samples - first, 1) for source, count in zip(self.sources, latest)}
        tasks: dict[str, float] = {}
        for source in self.sources:
            tasks[source.task] = tasks.get(source.task, 0.0) + shares[source.label]
        epochs = {s.label: stream.epochs_of(count) for s, stream, count in zip(self.sources, self.streams, counts)}
        return {"data_shares": shares, "data_task_shares": tasks, "data_epochs": epochs}
