"""Products of experts for a library that knows one matrix at a time: a loop, with the offsets on the host."""

from abc import abstractmethod
from collections.abc import Iterator

import torch

from dstrain.precision.backends.triton_kernels import KernelQuantizers
from dstrain.precision.fp8_gemm import Scaled


class LoopOverExperts(KernelQuantizers):
    """One product an expert. `offsets` are read from the device once a call, which waits for it."""

    @abstractmethod
    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        """a [M, K] with scale [M, ⌈K/128⌉], b [N, K] with scales by blocks or like a -> [M, N]. No size is 0."""

    @abstractmethod
    def add_product(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        """out FP32 [M, N] += a bᵀ, both with scales [·, ⌈K/128⌉]. No size is 0."""

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        if not len(a.codes):
            return torch.empty(0, len(b.codes), dtype=dtype, device=a.codes.device)
        return self.product(a, b, dtype)

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        if a.codes.shape[1]:
            self.add_product(a, b, out)

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(a.codes), b.codes.shape[1], dtype=dtype, device=a.codes.device)
        for expert, begin, end in groups(offsets):
            rows, weight = Scaled(*(x[begin:end] for x in a)), Scaled(*(x[expert] for x in b))
            out[begin:end] = self.product(rows, weight, dtype)
        return out

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        a, b = self.filled(a, offsets), self.filled(b, offsets)
        for expert, begin, end in groups(offsets):
            first = begin // 128 + expert  # as fp8_tiles counts
            tiles = slice(first, first + -(-(end - begin) // 128))
            self.add_product(columns_of(a, tiles), columns_of(b, tiles), out[expert])


def groups(offsets: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, its first row, its last row's successor) for every expert that has rows."""
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            yield expert, begin, end
        begin = end


def columns_of(x: Scaled, tiles: slice) -> Scaled:
    """The part of filled columns that belongs to some tiles."""
    return Scaled(x.codes[:, 128 * tiles.start : 128 * tiles.stop], x.scale[:, tiles])
