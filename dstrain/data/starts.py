"""Where the pieces of a row begin, for rows of so many pieces that a number for each of them is too much memory."""

from collections.abc import Callable

import numpy as np

BLOCK = 64  # pieces whose lengths are added up again for every question
AT_ONCE = 1 << 18  # pieces whose lengths are looked at together, so that they stay in the cache


class Starts:
    """The sums of the lengths before each piece. Only every BLOCK-th is kept."""

    def __init__(self, count: int, lengths: Callable[[slice], np.ndarray]):
        """lengths(pieces) -> the lengths, of any integer type, of a slice of the pieces 0 … count - 1."""
        self.count, self._lengths = count, lengths
        self._kept = np.zeros(-(-count // BLOCK) + 1, np.int64)  # before each block, and at the end
        for first in range(0, count, AT_ONCE):
            part = lengths(slice(first, min(first + AT_ONCE, count)))
            sums = np.add.reduceat(part, np.arange(0, len(part), BLOCK), dtype=np.int64)
            self._kept[first // BLOCK + 1 :][: len(sums)] = sums
        np.cumsum(self._kept, out=self._kept)
        self.total = int(self._kept[-1])

    def __getitem__(self, piece: int) -> int:
        """Where a piece begins; for `count`, where the last one ends."""
        block = piece // BLOCK
        return int(self._kept[block]) + int(self._lengths(slice(block * BLOCK, piece)).sum(dtype=np.int64))

    def find(self, position: int) -> tuple[int, int]:
        """The last piece that begins at `position` or before, and where it begins; (count, total) from the end on."""
        if position >= self.total:
            return self.count, self.total
        block = int(np.searchsorted(self._kept, position, side="right")) - 1
        first, begin = block * BLOCK, int(self._kept[block])
        ends = self._lengths(slice(first, min(first + BLOCK, self.count))).cumsum(dtype=np.int64)
        inside = int(np.searchsorted(ends, position - begin, side="right"))
        return first + inside, begin + (int(ends[inside - 1]) if inside else 0)
