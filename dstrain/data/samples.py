"""Samples addressed by a number alone: shuffled and endless for training, in order and once for evaluation.

The training stream is made of epochs; an epoch holds every document once, in an order drawn from (seed, epoch), one
after the other without padding (fim.py may rearrange some). Sample i is the L + 1 + D tokens from token i·L of the
stream on (L the sequence length, D the MTP depth): its last 1 + D tokens overlap the next sample, so every depth has its
whole window of targets.
Nothing is remembered between samples, hence a run resumes, on any number of readers, by knowing the next i.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from dstrain.config.errors import InputError
from dstrain.data.indexed import IndexedDataset
from dstrain.data.starts import AT_ONCE, Starts

EPOCHS_KEPT = 3  # orders in memory: a sample may need two neighbours
NEXT = 16  # documents looked up together


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 … count - 1 in an order drawn from (seed, epoch), int64 [count].

    The raw output of PCG64 and SeedSequence is the same in every version of NumPy; that of `permutation` need not be.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])).random_raw(count)
    # The number itself takes the low bits of its random key: a sort is much faster than argsort, and nothing ties.
    low = np.uint64((1 << max(count - 1, 1).bit_length()) - 1)
    for first in range(0, count, AT_ONCE):  # in parts, so that the keys are the only array of this size
        part = keys[first : first + AT_ONCE]
        part &= ~low
        part |= np.arange(first, first + len(part), dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def scatter(number: int, size: int, key: int) -> int:
    """Where `number` of 0 … size - 1 goes in a permutation drawn by `key`: a Feistel network, so nothing is stored.

    The network permutes 0 … 4^k - 1; a number that lands outside 0 … size - 1 is sent on until it lands inside.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for turn in range(4):
            left, right = right, left ^ (mix(mix(key + turn) ^ right) & mask)
        number = left << half | right
        if number < size:
            return number


def mix(value: int) -> int:
    """The finaliser of SplitMix64: every bit of `value` moves every bit of the result."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


class Epochs(Protocol):
    """The documents of a dataset as an epoch holds them."""

    num_tokens: int  # of one epoch, the same in all of them

    def lengths(self, epoch: int, documents: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Tokens of these documents, of all by default, int64."""

    def read(self, epoch: int, document: int, offset: int, length: int) -> np.ndarray:
        """`length` ids of a document from its token `offset` on, int64 [length]."""


class AsStored:
    """Every epoch holds the documents as the dataset has them."""

    def __init__(self, dataset: IndexedDataset):
        self.dataset, self.num_tokens = dataset, dataset.num_tokens

    def lengths(self, epoch: int, documents: slice | np.ndarray = slice(None)) -> np.ndarray:
        return self.dataset.lengths(documents)

    def read(self, epoch: int, document: int, offset: int, length: int) -> np.ndarray:
        return self.dataset.read(document, offset, length)


class _Order:
    """Documents of an epoch in one order: `documents`, of any integer type; None: as they are numbered."""

    def __init__(self, epochs: Epochs, epoch: int, count: int, documents: np.ndarray | None):
        self.epochs, self.epoch, self.documents = epochs, epoch, documents
        self.starts = Starts(count, self._lengths)  # tokens before each document of the order

    def _lengths(self, slots: slice) -> np.ndarray:
        return self.epochs.lengths(self.epoch, slots if self.documents is None else self.documents[slots])

    def copy(self, position: int, tokens: np.ndarray, numbers: np.ndarray, first: int) -> int:
        """Fill `tokens` from token `position` of this order on, and `numbers` with documents counted from `first`.

        Returns the number after the last one used. Empty documents are passed over and get no number.
        """
        slot, start = self.starts.find(position)
        offset, done = position - start, 0
        for begin in range(slot, self.starts.count, NEXT):
            following = slice(begin, begin + NEXT)
            documents = range(begin, begin + NEXT) if self.documents is None else self.documents[following].tolist()
            for document, length in zip(documents, self._lengths(following).tolist()):
                take = min(len(tokens) - done, length - offset)
                if take:
                    tokens[done : done + take] = self.epochs.read(self.epoch, document, offset, take)
                    numbers[done : done + take] = first
                    done, first = done + take, first + 1
                    if done == len(tokens):
                        return first
                offset = 0
        return first


def stacked(
    samples: Iterable[tuple[np.ndarray, np.ndarray]], count: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples side by side: tokens and document numbers, both int64 [count, width]."""
    tokens, documents = np.empty((2, count, width), np.int64)
    for row, sample in enumerate(samples):
        tokens[row], documents[row] = sample
    return torch.from_numpy(tokens), torch.from_numpy(documents)


class SampleStream:
    """The endless training stream of a dataset. `sample(i)` is a pure function of (dataset, seed, i), i = 0, 1, …, and so is
    `visited(n)`, the sample of visit n. `batch` takes visits."""

    def __init__(
        self, dataset: IndexedDataset, seed: int, sequence_length: int, depth: int, epochs: Epochs | None = None
    ):
        """epochs: what the dataset's documents are in each epoch; None: as they are stored."""
        self.seed, self.sequence_length = seed, sequence_length
        self.documents, self.epochs = dataset.num_documents, epochs or AsStored(dataset)
        self.width = sequence_length + 1 + depth
        if dataset.num_tokens < self.width:
            raise InputError(
                f"{dataset.bin_path}: {dataset.num_tokens} tokens found, one sample needs {self.width} "
                f"(data.sequence_length {sequence_length} + 1 + MTP depth {depth})"
            )
        self.block = self.epochs.num_tokens // sequence_length  # samples scattered together, at least 1
        self._orders: OrderedDict[int, _Order] = OrderedDict()

    def visited(self, n: int) -> int:
        """The sample of visit n = 0, 1, …"""
        block, number = divmod(n, self.block)
        return block * self.block + scatter(number, self.block, mix(self.seed % 2**64) + block)

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Visits first … first + count - 1: tokens and document numbers, both int64 [count, L + 1 + D]."""
        return stacked((self.sample(self.visited(n)) for n in range(first, first + count)), count, self.width)

    def epochs_of(self, visits: int) -> float:
        """The epochs that so many visits are."""
        return visits * self.sequence_length / self.epochs.num_tokens

    def metrics(self, samples: int) -> dict:
        """For the metrics of a step that ends after so many samples."""
        return {"data_epochs": {"train": self.epochs_of(samples)}}

    def epoch_of(self, i: int) -> int:
        """The epoch, from 0, in which sample i begins."""
        return i * self.sequence_length // self.epochs.num_tokens

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample i: token ids, and each token's document, counted from 0 within the sample; int64 [L + 1 + D] both."""
        if i < 0:
            raise IndexError(f"sample {i}: samples are counted from 0")
        tokens, documents = np.empty((2, self.width), np.int64)
        size = self.epochs.num_tokens
        epoch, position = divmod(i * self.sequence_length, size)
        done = number = 0
        while done < self.width:
            take = min(self.width - done, size - position)
            part = slice(done, done + take)
            number = self._order(epoch).copy(position, tokens[part], documents[part], number)
            done, epoch, position = done + take, epoch + 1, 0
        return tokens, documents

    def _order(self, epoch: int) -> _Order:
        if epoch not in self._orders:
            # Kept in the smallest type: with many sources there are many orders.
            order = shuffled(self.documents, self.seed, epoch).astype(np.min_scalar_type(self.documents))
            self._orders[epoch] = _Order(self.epochs, epoch, self.documents, order)
            while len(self._orders) > EPOCHS_KEPT:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]


class EvalWindows:
    """The whole dataset once, in its order: window i predicts the tokens i·L + 1 … (i + 1)·L.

    So every token but the first is predicted once. Where the last window runs beyond the end, token ids are 0 and
    document numbers -1.
    """

    def __init__(self, dataset: IndexedDataset, sequence_length: int, depth: int):
        self.dataset, self.sequence_length = dataset, sequence_length
        self.width = sequence_length + 1 + depth
        if dataset.num_tokens < 2:
            raise InputError(f"{dataset.bin_path}: {dataset.num_tokens} tokens found, evaluation needs at least 2")
        self._order = _Order(AsStored(dataset), 0, dataset.num_documents, None)

    def batch(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows first … first + count - 1: tokens and document numbers, both int64 [count, L + 1 + D]."""
        return stacked((self.sample(i) for i in range(first, first + count)), count, self.width)

    def __len__(self) -> int:
        """Number of windows."""
        return -(-(self.dataset.num_tokens - 1) // self.sequence_length)

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Window i: token ids and document numbers within the window, int64 [L + 1 + D]; IndexError beyond the last."""
        if not 0 <= i < len(self):
            raise IndexError(f"evaluation window {i} of {len(self)}")
        tokens, documents = np.zeros(self.width, np.int64), np.full(self.width, -1, np.int64)
        position = i * self.sequence_length
        real = min(self.width, self.dataset.num_tokens - position)
        self._order.copy(position, tokens[:real], documents[:real], 0)
        return tokens, documents


def check_ids(tokens: torch.Tensor, vocab_size: int, where: str, first: int = 0) -> None:
    """InputError if a token of a batch [count, width] is no id of the vocabulary; its first row is sample `first`."""
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        row, column = torch.nonzero((tokens < 0) | (tokens >= vocab_size))[0].tolist()
        raise InputError(
            f"{where}: token id {int(tokens[row, column])} in sample {first + row} at position {column}, "
            f"the vocabulary has the ids 0 … {vocab_size - 1}"
        )
