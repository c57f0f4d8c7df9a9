"""Host memory that a save copies its tensors into, so that training goes on while they are written.

Training waits for the copy, and most of a copy into new memory is the kernel handing out that memory page by page: kept
from save to save it takes a fifth of the time. (Huge pages would be handed out faster, where there are any: on a machine
that has run for a while the kernel first has to make room for them.)
"""

import torch

from dstrain.checkpoint.tensors import Piece, Tensors, as_piece

ALIGN = 64  # bytes


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
        copies = {}
        for (name, piece), begin in zip(pieces.items(), begins):
            source = piece.tensor.detach()
            copy = self._memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
            copies[name] = Piece(copy.copy_(source), piece.shape, piece.offset)
        return copies
