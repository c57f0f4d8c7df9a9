"""Packed E5M6 as kernels of `dstrain.precision.e5m6`: how the input of the Linear after attention is kept."""

import torch
import triton
import triton.language as tl

from dstrain.precision.fp8_scales import FP8, TILE
from dstrain.precision.kernels.formats import E5M6, divide, e5m6_decode, e5m6_encode, e5m6_load, magnitude, scale_of
from dstrain.precision.kernels.tiles import ROWS, with_rows, write_columns


@triton.jit
def quantize_e5m6_kernel(x, packed, scales, rows, cols, x_stride, bytes_, tiles, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    values = tl.load(
        x + row.to(tl.int64) * x_stride + column, mask=(row < rows) & (column < cols), other=0.0
    ).to(tl.float32)
    scale = scale_of(tl.max(magnitude(values), axis=1, keep_dims=True), True, E5M6)
    tl.store(scales + row.to(tl.int64) * tiles + tl.program_id(1), scale, mask=row < rows)
    a, b = tl.split(tl.reshape(e5m6_encode(divide(values, scale, True)), (ROWS, 64, 2)))
    pair = (tl.program_id(1) * 64 + tl.arange(0, 64))[None, :]
    place = packed + row.to(tl.int64) * bytes_ + 3 * pair
    inside = (row < rows) & (2 * pair < cols)
    tl.store(place, (a & 0xFF).to(tl.uint8), mask=inside)
    tl.store(place + 1, ((a >> 8) | ((b & 0xF) << 4)).to(tl.uint8), mask=inside)
    tl.store(place + 2, (b >> 4).to(tl.uint8), mask=inside)


def quantize_e5m6(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`e5m6.quantize_e5m6`: x [rows, cols] -> packed uint8 [rows, 3 · ⌈cols/2⌉], FP32 scale [rows, ⌈cols/128⌉]."""
    x, (rows, cols), tiles, size = with_rows(x), x.shape, -(-x.shape[1] // TILE), 3 * -(-x.shape[1] // 2)
    packed, scales = x.new_empty(rows, size, dtype=torch.uint8), x.new_empty(rows, tiles, dtype=torch.float32)
    if x.numel():
        grid = (triton.cdiv(rows, ROWS), tiles)
        quantize_e5m6_kernel[grid](x, packed, scales, rows, cols, x.stride(0), size, tiles, ROWS)
    return packed, scales


@triton.jit
def dequantize_e5m6_kernel(packed, scales, out, rows, cols, bytes_, tiles, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    inside = (row < rows) & (column < cols)
    codes = e5m6_load(packed + row.to(tl.int64) * bytes_, column, inside)
    scale = tl.load(scales + row.to(tl.int64) * tiles + tl.program_id(1), mask=row < rows, other=0.0)
    values = (e5m6_decode(codes) * scale).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * cols + column, values, mask=inside)


def dequantize_e5m6(packed: torch.Tensor, scale: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """`e5m6.dequantize_e5m6`: -> [rows, cols] in `dtype`."""
    rows, tiles = scale.shape
    out = torch.empty(rows, cols, dtype=dtype, device=packed.device)
    if out.numel():
        grid = (triton.cdiv(rows, ROWS), tiles)
        dequantize_e5m6_kernel[grid](packed, scale, out, rows, cols, packed.shape[1], tiles, ROWS)
    return out


@triton.jit
def e5m6_to_columns_kernel(
    packed, scales, out, out_scales, rows, cols, bytes_, tiles, out_tiles, POWER_OF_TWO: tl.constexpr
):
    tile = tl.program_id(0)
    row, column = (tile * 128 + tl.arange(0, 128))[:, None], (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    inside = (row < rows) & (column < cols)
    codes = e5m6_load(packed + row.to(tl.int64) * bytes_, column, inside)
    scale = tl.load(scales + row.to(tl.int64) * tiles + tl.program_id(1), mask=row < rows, other=0.0)
    values = e5m6_decode(codes) * scale
    moved = scale_of(tl.max(magnitude(values), axis=0, keep_dims=True), True, E5M6)
    values = e5m6_decode(e5m6_encode(divide(values, moved, True))) * moved
    write_columns(
        values, out, out_scales, tile, tile * 128, rows - tile * 128, cols, rows, out_tiles, POWER_OF_TWO, False
    )


def e5m6_to_columns(
    packed: torch.Tensor, scale: torch.Tensor, cols: int, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`e5m6.e5m6_to_columns`: E5M6 in 1x128, then in 128x1 tiles -> E4M3 [cols, rows], scale [cols, ⌈rows/128⌉]."""
    (rows, tiles), out_tiles = scale.shape, -(-scale.shape[0] // TILE)
    out = packed.new_empty(cols, rows, dtype=FP8)
    out_scales = scale.new_empty(cols, out_tiles)
    if out.numel():
        e5m6_to_columns_kernel[(out_tiles, tiles)](
            packed, scale, out, out_scales, rows, cols, packed.shape[1], tiles, out_tiles, power_of_two, num_warps=8
        )
    return out, out_scales
