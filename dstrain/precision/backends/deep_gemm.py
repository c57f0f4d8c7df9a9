"""FP8 products of DeepGEMM, DeepSeek's library for Hopper.

Written from DeepGEMM's source, 2.1 and later. Nobody has run it yet; the layouts are checked on a CPU, with the library
replaced by the products that its source describes:

    fp8_gemm_nt                          scales [M, ⌈K/128⌉] and [⌈N/128⌉, ⌈K/128⌉], BF16 out; with recipe (1, 1, 128)
                                         and c: scales of rows both, FP32 out, added to c
    m_grouped_fp8_gemm_nt_contiguous     every expert's rows begin at a multiple of 128; an int32 per row names its
                                         expert, -1: none; BF16 out
    k_grouped_fp8_gemm_nt_contiguous     each expert's [M, K of e] contiguous, one behind the other; K of e on the
                                         host, a multiple of 128; scales [M, tiles]; FP32 out, added to c

The last one needs the offsets on the host, which waits for the device.
"""

import importlib

import torch

from dstrain.precision.backends.loops import groups
from dstrain.precision.backends.requirements import require_hopper, require_package
from dstrain.precision.backends.triton_kernels import KernelQuantizers
from dstrain.precision.fp8_gemm import Scaled
from dstrain.precision.fp8_tiles import TILE, column_tiles


class DeepGemm(KernelQuantizers):
    name = "deepgemm"

    @classmethod
    def require(cls, device: torch.device) -> None:
        require_package(cls.name, "triton", "triton", "3.6")  # for the quantisers
        require_package(cls.name, "deep_gemm", "deep_gemm", "2.1")
        require_hopper(cls.name, device)

    def __init__(self, power_of_two: bool = True):
        super().__init__(power_of_two)
        self.library = importlib.import_module("deep_gemm")

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        """The library's product of these is BF16 alone; an FP32 result is that, widened."""
        out = torch.empty(len(a.codes), len(b.codes), dtype=torch.bfloat16, device=a.codes.device)
        self.library.fp8_gemm_nt(operand(a), operand(b), out)
        return out.to(dtype)

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        self.library.fp8_gemm_nt(operand(a), operand(b), out, c=out, recipe=(1, 1, 128))

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows, (experts, n, k) = len(a.codes), b.codes.shape
        device, tiles = a.codes.device, column_tiles(rows, offsets)
        # every expert's rows from a multiple of 128 on, at the tiles that fp8_tiles would count for a column
        row = torch.arange(rows, device=device)
        expert = torch.searchsorted(offsets, row.int(), right=True)
        begins = torch.cat((offsets.new_zeros(1), offsets)).long()[expert]
        place = torch.where(expert < experts, (begins // TILE + expert) * TILE + row - begins, tiles * TILE)
        room = tiles * TILE + 1  # rows of no expert all go to the last, which is cut off
        codes = a.codes.new_zeros(room, k, dtype=torch.uint8)
        codes[place] = a.codes.view(torch.uint8)
        scale, layout = a.scale.new_ones(room, a.scale.shape[1]), offsets.new_full((room,), -1)
        scale[place], layout[place] = a.scale, expert.int()
        out = torch.empty(room - 1, n, dtype=torch.bfloat16, device=device)
        spread = Scaled(codes[:-1].view(a.codes.dtype), scale[:-1])
        self.library.m_grouped_fp8_gemm_nt_contiguous(operand(spread), operand(b), out, layout[:-1])
        return out[place.clamp_max(room - 2)].to(dtype)

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        sizes, pieces = [0] * len(offsets), []
        for expert, begin, end in groups(offsets):
            first, count = begin // TILE + expert, -(-(end - begin) // TILE)
            sizes[expert] = count * TILE
            pieces.append(slice(first, first + count))
        if not pieces:
            return
        left, right = (one_behind_the_other(self.filled(x, offsets), pieces) for x in (a, b))
        counts = torch.tensor(sizes, dtype=torch.int32, device=offsets.device)
        self.library.k_grouped_fp8_gemm_nt_contiguous(left, right, out, sizes, counts, c=out)


def operand(x: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    from dstrain.precision.kernels.gemm import whole_16

    return whole_16(x.codes), x.scale


def one_behind_the_other(x: Scaled, pieces: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Filled columns -> the experts' codes in one dimension, each [M, K of e] contiguous; scales [M, tiles]."""
    codes = [x.codes[:, TILE * p.start : TILE * p.stop].reshape(-1).view(torch.uint8) for p in pieces]
    return torch.cat(codes).view(x.codes.dtype), torch.cat([x.scale[:, p] for p in pieces], dim=1)
