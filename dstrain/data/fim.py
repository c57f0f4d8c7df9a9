"""Fill-in-the-middle (arXiv 2207.14255; DeepSeek-V3, section 4.1): some documents as prefix, suffix, middle.

A document BOS x EOS becomes

    BOS  begin  x[:a]  hole  x[b:]  end  x[a:b]  EOS

with 0 <= a < b <= |x|: every token is there once, and one each of the three marks. The cuts are between tokens. Which
documents are rearranged, and where they are cut, is drawn from (seed, epoch, document). Their number is the same in
every epoch, so all epochs are of one length, and a sample is found as without it.
"""

from collections import OrderedDict

import numpy as np

from dstrain.data.indexed import IndexedDataset
from dstrain.data.samples import EPOCHS_KEPT, mix, shuffled
from dstrain.data.starts import AT_ONCE
from dstrain.data.tokenizer import Tokenizer

SHORTEST = 3  # tokens: begin mark, one token, end mark
MARKS = 3
CHOICE, CUTS = 0x66696D63, 0x66696D78  # keys that tell these draws from the order's


class FillInTheMiddle:
    """Epochs of a dataset in which a share `rate` of its documents is rearranged."""

    def __init__(self, dataset: IndexedDataset, seed: int, rate: float, tokenizer: Tokenizer):
        """InputError if the tokenizer has no marks. Documents of less than three tokens stay as they are."""
        self.dataset, self.seed, self.marks = dataset, seed % 2**64, tokenizer.fim_ids()
        self.bos_id, self.eos_id = tokenizer.bos_id, tokenizer.eos_id
        parts = range(0, dataset.num_documents, AT_ONCE)
        self.able = sum(int(np.count_nonzero(self._able(slice(first, first + AT_ONCE)))) for first in parts)
        self.count = round(rate * self.able)  # documents of each epoch
        self.num_tokens = dataset.num_tokens + MARKS * self.count
        self._chosen: OrderedDict[int, np.ndarray] = OrderedDict()

    def chosen(self, epoch: int) -> np.ndarray:
        """Which documents are rearranged in an epoch, bool [documents]."""
        if epoch not in self._chosen:
            marked = np.zeros(self.dataset.num_documents, bool)
            if self.count:
                turns = shuffled(self.able, mix(self.seed ^ CHOICE), epoch)[: self.count].copy()  # lets go of the rest
                marked[np.flatnonzero(self._able(slice(None)))[turns]] = True
            self._chosen[epoch] = marked
            while len(self._chosen) > EPOCHS_KEPT:
                self._chosen.popitem(last=False)
        self._chosen.move_to_end(epoch)
        return self._chosen[epoch]

    def _able(self, documents: slice) -> np.ndarray:
        """Which of these documents are long enough, bool."""
        return self.dataset.lengths(documents) >= SHORTEST

    def lengths(self, epoch: int, documents: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Tokens of these documents, of all by default, marks included, int64."""
        return self.dataset.lengths(documents) + MARKS * self.chosen(epoch)[documents]

    def read(self, epoch: int, document: int, offset: int, length: int) -> np.ndarray:
        """`length` ids of a document of this epoch from its token `offset` on, int64 [length]."""
        if not self.chosen(epoch)[document]:
            return self.dataset.read(document, offset, length)
        out, place, end = np.empty(length, np.int64), 0, offset + length
        for piece in self._pieces(epoch, document):
            size = 1 if isinstance(piece, int) else piece.stop - piece.start
            first, last = max(offset, place), min(end, place + size)
            if first < last:
                if isinstance(piece, int):
                    ids = piece
                else:
                    ids = self.dataset.read(document, piece.start + first - place, last - first)
                out[first - offset : last - offset] = ids
            place += size
        return out

    def _pieces(self, epoch: int, document: int) -> list[int | slice]:
        """A rearranged document: marks, and slices of it as it is stored."""
        size = self.dataset.length(document)
        begin, hole, end = self.marks
        # A document of another tool may lack its marks; those that are there stay outside.
        first = int(self.dataset.read(document, 0, 1)[0] == self.bos_id)
        last = size - int(self.dataset.read(document, size - 1, 1)[0] == self.eos_id)
        a, b = (first + cut for cut in self.cuts(epoch, document, last - first))
        return [slice(0, first), begin, slice(first, a), hole, slice(b, last), end, slice(a, b), slice(last, size)]

    def cuts(self, epoch: int, document: int, size: int) -> tuple[int, int]:
        """Two different cuts a < b of 0 … size; every pair is equally likely."""
        key = mix(mix(mix(self.seed ^ CUTS) + epoch) + document)
        a, b = key % (size + 1), mix(key) % size
        b += b >= a
        return min(a, b), max(a, b)
