"""Host memory that a save copies its tensors into, so that training goes on while they are written.

Training waits for the copy, and most of a copy into new memory is the kernel handing out that memory page by page: kept
from save to save it takes a fifth of the time. (Huge pages would be handed out faster, where there are any: on a
machine that has run for a while the kernel first has to make room for them.)
"""

import os

import numpy as np
import torch

from dstrain.checkpoint.in_threads import in_threads
from dstrain.checkpoint.tensors import Piece, Tensors, as_piece

ALIGN = 64  # bytes
THREADS = 4  # that copy, with as many processors


class Staging:
    """One save uses it at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Tensors) -> dict[str, Piece]:
        """Contiguous copies in host memory, which the next call overwrites. tensors: any device, shape and dtype."""
        pieces = {name: as_piece(part) for name, part in tensors.items()}
        begins, total = [], 0
        for piece in pieces.values():
            begins.append(total)
            total += -(-piece.tensor.nbytes // ALIGN) * ALIGN
        if len(self._memory) < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._memory = torch.empty(total, dtype=torch.uint8)
        copies, inside = {}, []
        for (name, piece), begin in zip(pieces.items(), begins):
            source = piece.tensor.detach()
            memory = self._memory[begin : begin + source.nbytes]
            copies[name] = Piece(memory.view(source.dtype).view(source.shape), piece.shape, piece.offset)
            if source.device.type == "cpu" and source.is_contiguous():
                inside.append((memory.numpy(), source.view(-1).view(torch.uint8).numpy()))
            else:  # by this thread, whose stream has computed it
                copies[name].tensor.copy_(source)
        # Not by PyTorch's threads: they wait for each other at the end of every tensor, and where other processes want
        # the processors too that was seen to take thirty times as long as the copy.
        in_threads(lambda pair: np.copyto(*pair), inside, min(THREADS, len(os.sched_getaffinity(0))))
        return copies
