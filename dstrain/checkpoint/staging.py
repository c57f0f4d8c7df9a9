"""Host memory that a save copies its tensors into, so that training goes on while they are written.

Training waits for the copy, and most of a copy into new memory is the kernel handing out that memory page by page. So
the memory is asked for in huge pages, and kept from save to save.
"""

import mmap
from contextlib import suppress

import torch

from dstrain.checkpoint.tensors import Piece, Tensors, as_piece

ALIGN = 64  # bytes


class Staging:
    """One save uses it at a time."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def copy(self, tensors: Tensors) -> dict[str, Piece]:
        """Contiguous copies in host memory, which the next call overwrites. tensors: any device, shape and dtype."""
        pieces = {name: as_piece(part) for name, part in tensors.items()}
        begins, total = [], 0
        for piece in pieces.values():
            begins.append(total)
            total += -(-piece.tensor.nbytes // ALIGN) * ALIGN
        memory = torch.frombuffer(self._at_least(total), dtype=torch.uint8)
        copies = {}
        for (name, piece), begin in zip(pieces.items(), begins):
            source = piece.tensor.detach()
            copy = memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
            copies[name] = Piece(copy.copy_(source), piece.shape, piece.offset)
        return copies

    def _at_least(self, nbytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = None  # the old goes before the new comes
            self._memory = mmap.mmap(-1, max(nbytes, ALIGN), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        return self._memory
