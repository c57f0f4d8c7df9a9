"""What moves tokens to experts and back, by whatever is best on a tensor's device.

On the CPU the definitions in plain PyTorch, a pass over memory for each of their operations; on CUDA the Triton kernels
that equal them bit by bit, one pass each. Triton comes with PyTorch's builds for CUDA. Without data (`stand_in`): what
the kernels make, as shapes.
"""

import torch

from dstrain.precision import fp8_tiles, pointwise
from dstrain.precision.fp8_scales import FP8, TILE
from dstrain.precision.stand_in import on_cuda
from dstrain.precision.widen import at_least_fp32

SUM_ELEMENTS = 1 << 26  # gathered elements at once while the rows of tokens are summed


def by_kernels(x: torch.Tensor) -> bool:
    return on_cuda(x) and x.dtype != torch.float64


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_tiles.quantize_rows` with scales that are powers of two."""
    if by_kernels(x):
        if x.is_meta:
            scale = x.new_empty(len(x), -(-x.shape[1] // TILE), dtype=torch.float32)
            return x.new_empty(x.shape, dtype=FP8), scale
        from dstrain.precision.kernels import tiles

        return tiles.quantize_rows(x)
    return fp8_tiles.quantize_rows(x)


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`fp8_tiles.dequantize_rows`."""
    if by_kernels(codes):
        if codes.is_meta:
            return codes.new_empty(codes.shape, dtype=dtype)
        from dstrain.precision.kernels import tiles

        return tiles.dequantize_rows(codes, scale, dtype)
    return fp8_tiles.dequantize_rows(codes, scale, dtype)


def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """rows [n, hidden], places int64 [T, choices] -> rows[places].sum(1) [T, hidden].

    Added in the order of the choices, in at least FP32, and rounded once. Gathers, so no order depends on the device.
    """
    if by_kernels(rows):
        if rows.is_meta:
            return rows.new_empty(len(places), rows.shape[1])
        from dstrain.precision.kernels import permute

        return permute.unpermute(rows, places)
    if pointwise.compiled:
        return _sum_of_rows(rows, places)
    step = max(SUM_ELEMENTS // max(places.shape[1] * rows.shape[1], 1), 1)
    parts = [
        rows.index_select(0, part.flatten()).view(*part.shape, rows.shape[1]).sum(dim=1) for part in places.split(step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@pointwise.kernel
def _sum_of_rows(rows, places):
    """One pass over memory, compiled; operation by operation a gather of all rows at once is faster."""
    first, *rest = places.unbind(1)
    total = at_least_fp32(rows[first])
    for place in rest:
        total = total + rows[place]
    return total.to(rows.dtype)
