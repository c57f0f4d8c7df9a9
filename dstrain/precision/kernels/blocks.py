"""Weights in 128x128 blocks (`fp8_blocks`): W and Wᵀ, as Fprop and Dgrad take them, from one read."""

import torch
import triton
import triton.language as tl

from dstrain.precision.fp8_blocks import scale_shape
from dstrain.precision.fp8_scales import FP8
from dstrain.precision.kernels.formats import E4M3, magnitude, scale_of, to_e4m3


@triton.jit
def quantize_blocks_kernel(
    weight, codes, scales, turned_codes, turned_scales, rows, cols, POWER_OF_TWO: tl.constexpr
):
    matrix, block_row, block_column = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    row, column = (block_row * 128 + tl.arange(0, 128))[:, None], (block_column * 128 + tl.arange(0, 128))[None, :]
    inside = (row < rows) & (column < cols)
    start = matrix * rows * cols
    place = start + row.to(tl.int64) * cols + column
    values = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(magnitude(values), axis=1, keep_dims=True), axis=0, keep_dims=True)
    scale = scale_of(amax, POWER_OF_TWO, E4M3)  # [1, 1]
    block = to_e4m3(values, scale, POWER_OF_TWO)
    tl.store(codes + place, block, mask=inside)
    tl.store(turned_codes + start + tl.trans(column).to(tl.int64) * rows + tl.trans(row), tl.trans(block),
             mask=tl.trans(inside))
    block_rows, block_columns = tl.cdiv(rows, 128), tl.cdiv(cols, 128)
    first = matrix * block_rows * block_columns + tl.zeros((1, 1), tl.int32)
    tl.store(scales + first + block_row * block_columns + block_column, scale)
    tl.store(turned_scales + first + block_column * block_rows + block_row, scale)


def quantize_weight(
    weight: torch.Tensor, power_of_two: bool = True
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """weight [..., out, in], contiguous, any float type -> (codes, scale) of `fp8_blocks.quantize_blocks`, and both
    transposed: E4M3 [..., in, out], FP32 [..., ⌈in/128⌉, ⌈out/128⌉]."""
    rows, cols = weight.shape[-2:]
    matrices = weight.numel() // (rows * cols)
    turned = (*weight.shape[:-2], cols, rows)
    codes, turned_codes = weight.new_empty(weight.shape, dtype=FP8), weight.new_empty(turned, dtype=FP8)
    scales = weight.new_empty(scale_shape(weight.shape), dtype=torch.float32)
    turned_scales = weight.new_empty(scale_shape(turned), dtype=torch.float32)
    grid = (triton.cdiv(cols, 128), triton.cdiv(rows, 128), matrices)
    quantize_blocks_kernel[grid](
        weight.contiguous(), codes, scales, turned_codes, turned_scales, rows, cols, power_of_two, num_warps=8
    )
    return (codes, scales), (turned_codes, turned_scales)
