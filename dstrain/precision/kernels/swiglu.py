"""SwiGLU between FP8 products: forward quantises its result and its inputs, backward everything that products take.

    forward    a = silu(g) · u · w           keeps g and u in E4M3, 1x128 tiles; a in E4M3 for the down projection
    backward   of g, u as kept: dg, du in both orientations, a again in columns for the down projection's Wgrad, dw

w is a factor per row (the expert's share of a token), or none. Definitions: `definitions.swiglu_quantize` and
`swiglu_backward_quantize`. Everything is computed in FP32, and rounded to the compute type before it is quantised, as
the unfused operations do.
"""

import torch
import triton
import triton.language as tl

from dstrain.precision.fp8_scales import FP8, TILE
from dstrain.precision.fp8_tiles import column_tiles
from dstrain.precision.kernels.formats import E4M3, magnitude, scale_of, to_e4m3
from dstrain.precision.kernels.tiles import ROWS, rows_of_tile, write_columns

Codes = tuple[torch.Tensor, torch.Tensor]  # E4M3 and its FP32 scales


@triton.jit
def write_rows(values, codes, scales, row, rows, column, cols, tiles, POWER_OF_TWO: tl.constexpr):
    """Quantise values FP32 [·, 128], zero outside, by rows and write them at `row` [·, 1] int64, where it is < rows."""
    scale = scale_of(tl.max(magnitude(values), axis=1, keep_dims=True), POWER_OF_TWO, E4M3)
    tl.store(codes + row * cols + column, to_e4m3(values, scale, POWER_OF_TWO), mask=(row < rows) & (column < cols))
    tl.store(scales + row * tiles + tl.program_id(1), scale, mask=row < rows)


@triton.jit
def swiglu_kernel(
    gate, up, weight, out, out_scales, gate_codes, gate_scales, up_codes, up_scales, rows, cols, tiles,
    POWER_OF_TWO: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    inside, place = (row < rows) & (column < cols), row * cols + column
    g, u = tl.load(gate + place, mask=inside, other=0.0), tl.load(up + place, mask=inside, other=0.0)
    compute = g.dtype
    g, u = g.to(tl.float32), u.to(tl.float32)
    product = tl.sigmoid(g) * g * u
    if WEIGHTED:
        product *= tl.load(weight + row, mask=row < rows, other=0.0)
    write_rows(product.to(compute).to(tl.float32), out, out_scales, row, rows, column, cols, tiles, POWER_OF_TWO)
    write_rows(g, gate_codes, gate_scales, row, rows, column, cols, tiles, POWER_OF_TWO)
    write_rows(u, up_codes, up_scales, row, rows, column, cols, tiles, POWER_OF_TWO)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[Codes, Codes, Codes]:
    """gate, up [rows, n] BF16 or FP32, contiguous; weight FP32 [rows] -> silu(gate) · up · weight, gate and up in 1x128
    tiles: E4M3 [rows, n] and FP32 scale [rows, ⌈n/128⌉] each."""
    (rows, cols), tiles = gate.shape, -(-gate.shape[1] // TILE)
    outs = [(gate.new_empty(rows, cols, dtype=FP8), gate.new_empty(rows, tiles, dtype=torch.float32)) for _ in range(3)]
    if gate.numel():
        grid = (triton.cdiv(rows, ROWS), tiles)
        swiglu_kernel[grid](
            gate, up, weight, *outs[0], *outs[1], *outs[2], rows, cols, tiles,
            POWER_OF_TWO=power_of_two, WEIGHTED=weight is not None, ROWS=ROWS,
        )
    return tuple(outs)


@triton.jit
def swiglu_backward_kernel(
    grad, gate_codes, gate_scales, up_codes, up_scales, weight, out, out_scales,
    gate_rows, gate_row_scales, gate_columns, gate_column_scales, up_rows, up_row_scales, up_columns, up_column_scales,
    weight_parts, offsets, experts, rows, cols, tiles, column_stride, column_tiles,
    POWER_OF_TWO: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr,
):
    tile = tl.program_id(0)
    first, rows_left = rows_of_tile(tile, offsets, experts, rows, EXPERTS)
    column = (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    row = (first + tl.arange(0, 128))[:, None].to(tl.int64)
    end = first + tl.minimum(rows_left, 128)
    inside, place, scale_place = (row < end) & (column < cols), row * cols + column, row * tiles + tl.program_id(1)
    dy = tl.load(grad + place, mask=inside, other=0.0)
    compute = dy.dtype
    dy = dy.to(tl.float32)
    g = tl.load(gate_codes + place, mask=inside, other=0.0).to(tl.float32)
    g = (g * tl.load(gate_scales + scale_place, mask=row < end, other=0.0)).to(compute).to(tl.float32)
    u = tl.load(up_codes + place, mask=inside, other=0.0).to(tl.float32)
    u = (u * tl.load(up_scales + scale_place, mask=row < end, other=0.0)).to(compute).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = sigmoid * g
    product = silu * u
    if WEIGHTED:
        tl.store(weight_parts + scale_place, tl.sum(product * dy, axis=1, keep_dims=True), mask=row < end)
        w = tl.load(weight + row, mask=row < end, other=0.0)
        product *= w
        dy *= w
    product = product.to(compute).to(tl.float32)
    write_columns(
        product, out, out_scales, tile, first, rows_left, cols, column_stride, column_tiles, POWER_OF_TWO, EXPERTS > 0
    )
    dgate = (dy * u * (sigmoid * (1 + g * (1 - sigmoid)))).to(compute).to(tl.float32)
    write_rows(dgate, gate_rows, gate_row_scales, row, end, column, cols, tiles, POWER_OF_TWO)
    write_columns(
        dgate, gate_columns, gate_column_scales, tile, first, rows_left, cols, column_stride, column_tiles,
        POWER_OF_TWO, EXPERTS > 0,
    )
    dup = (dy * silu).to(compute).to(tl.float32)
    write_rows(dup, up_rows, up_row_scales, row, end, column, cols, tiles, POWER_OF_TWO)
    write_columns(
        dup, up_columns, up_column_scales, tile, first, rows_left, cols, column_stride, column_tiles,
        POWER_OF_TWO, EXPERTS > 0,
    )


def swiglu_backward_quantize(
    grad: torch.Tensor, gate: Codes, up: Codes, weight: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None, power_of_two: bool = True,
) -> tuple[Codes, tuple[Codes, Codes], tuple[Codes, Codes], torch.Tensor | None]:
    """grad [rows, n] BF16 or FP32 of the weighted product; gate, up as forward kept them.

    -> the product in columns; dgate and dup each in rows and in columns; dweight FP32 [rows] or None. Columns are those
    of `tiles.quantize_columns` for `offsets`; rows that belong to no expert are left unwritten.
    """
    (rows, cols), tiles, columns = grad.shape, -(-grad.shape[1] // TILE), column_tiles(grad.shape[0], offsets)
    stride, experts = (rows, 0) if offsets is None else (columns * TILE, len(offsets))
    new, wide = (lambda *size: grad.new_empty(*size, dtype=FP8)), (lambda *size: grad.new_empty(*size, dtype=torch.float32))
    by_rows = [(new(rows, cols), wide(rows, tiles)) for _ in range(2)]
    by_columns = [(new(cols, stride), wide(cols, columns)) for _ in range(3)]
    parts = None if weight is None else wide(rows, tiles)
    if columns and cols:
        swiglu_backward_kernel[(columns, tiles)](
            grad, *gate, *up, weight, *by_columns[0], *by_rows[0], *by_columns[1], *by_rows[1], *by_columns[2], parts,
            offsets, experts, rows, cols, tiles, stride, columns,
            POWER_OF_TWO=power_of_two, WEIGHTED=weight is not None,
            EXPERTS=triton.next_power_of_2(experts) if experts else 0, num_warps=8,
        )
    dweight = None if parts is None else parts.sum(-1)
    return by_columns[0], (by_rows[0], by_columns[1]), (by_rows[1], by_columns[2]), dweight
