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
from dstrain.precision.kernels.tiles import ROWS, rows_of_tile, write_columns, write_rows

WIDTH = 64  # columns of 128 rows that one program takes backward; 128 of all that it computes would spill
Codes = tuple[torch.Tensor, torch.Tensor]  # E4M3 and its FP32 scales


@triton.jit
def swiglu_kernel(
    gate, up, weight, out, out_scales, gate_codes, gate_scales, up_codes, up_scales, rows, cols, tiles,
    POWER_OF_TWO: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    rows_left = rows - tl.program_id(0) * ROWS
    inside, place = (row < rows_left) & (column < cols), row * cols + column
    start, scale_start = first * cols, first * tiles + tl.program_id(1)
    g, u = tl.load(gate + start + place, mask=inside, other=0.0), tl.load(up + start + place, mask=inside, other=0.0)
    compute = gate.dtype.element_ty
    g = g.to(tl.float32)
    u = u.to(tl.float32)
    product = tl.sigmoid(g) * g * u
    if WEIGHTED:
        product *= tl.load(weight + first + row, mask=row < rows_left, other=0.0)
    product = product.to(compute).to(tl.float32)
    write_rows(product, out + start, out_scales + scale_start, row, rows_left, column, cols, tiles, POWER_OF_TWO)
    write_rows(g, gate_codes + start, gate_scales + scale_start, row, rows_left, column, cols, tiles, POWER_OF_TWO)
    write_rows(u, up_codes + start, up_scales + scale_start, row, rows_left, column, cols, tiles, POWER_OF_TWO)


def swiglu_quantize(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[Codes, Codes, Codes]:
    """gate, up [rows, n] BF16 or FP32; weight FP32 [rows] -> silu(gate) · up · weight, gate and up in 1x128
    tiles: E4M3 [rows, n] and FP32 scale [rows, ⌈n/128⌉] each."""
    (rows, cols), tiles = gate.shape, -(-gate.shape[1] // TILE)
    outs = [_room(gate, (rows, cols), (rows, tiles)) for _ in range(3)]
    if gate.numel():
        grid = (triton.cdiv(rows, ROWS), tiles)
        swiglu_kernel[grid](
            gate.contiguous(), up.contiguous(), weight, *outs[0], *outs[1], *outs[2], rows, cols, tiles,
            POWER_OF_TWO=power_of_two, WEIGHTED=weight is not None, ROWS=ROWS,
        )
    return tuple(outs)


@triton.jit
def kept(codes, scales, place, scale_place, inside, inside_rows, compute: tl.constexpr):
    """What forward kept of an input: FP32 values of the compute type, as if they had never been quantised."""
    values = tl.load(codes + place, mask=inside, other=0.0).to(tl.float32)
    return (values * tl.load(scales + scale_place, mask=inside_rows, other=0.0)).to(compute).to(tl.float32)


@triton.jit
def swiglu_backward_rows_kernel(
    grad, gate_codes, gate_scales, up_codes, up_scales, weight, dgate, dgate_scales, dup, dup_scales, weight_parts,
    rows, cols, tiles, POWER_OF_TWO: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):
    first, rows_left = tl.program_id(0).to(tl.int64) * ROWS, rows - tl.program_id(0) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    inside_rows, inside = row < rows_left, (row < rows_left) & (column < cols)
    start, scale_start = first * cols, first * tiles + tl.program_id(1)
    place, scale_place = row * cols + column, row * tiles
    compute = grad.dtype.element_ty
    g = kept(gate_codes + start, gate_scales + scale_start, place, scale_place, inside, inside_rows, compute)
    u = kept(up_codes + start, up_scales + scale_start, place, scale_place, inside, inside_rows, compute)
    dy = tl.load(grad + start + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = sigmoid * g
    if WEIGHTED:
        part = tl.sum(silu * u * dy, axis=1, keep_dims=True)
        tl.store(weight_parts + scale_start + scale_place, part, mask=inside_rows)
        dy *= tl.load(weight + first + row, mask=inside_rows, other=0.0)
    result = (dy * u * (sigmoid * (1 + g * (1 - sigmoid)))).to(compute).to(tl.float32)
    write_rows(result, dgate + start, dgate_scales + scale_start, row, rows_left, column, cols, tiles, POWER_OF_TWO)
    result = (dy * silu).to(compute).to(tl.float32)
    write_rows(result, dup + start, dup_scales + scale_start, row, rows_left, column, cols, tiles, POWER_OF_TWO)


@triton.jit
def swiglu_backward_columns_kernel(
    grad, gate_codes, gate_scales, up_codes, up_scales, weight, out, out_scales, dgate, dgate_scales, dup, dup_scales,
    offsets, experts, rows, cols, tiles, column_stride, column_tiles,
    POWER_OF_TWO: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
):
    tile = tl.program_id(0)
    first, rows_left = rows_of_tile(tile, offsets, experts, rows, EXPERTS)
    row, column = tl.arange(0, 128)[:, None], (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside_rows, inside = row < rows_left, (row < rows_left) & (column < cols)
    start, scale_start = first.to(tl.int64) * cols, first.to(tl.int64) * tiles + tl.program_id(1) * WIDTH // 128
    place, scale_place = row * cols + column, row * tiles
    compute = grad.dtype.element_ty
    g = kept(gate_codes + start, gate_scales + scale_start, place, scale_place, inside, inside_rows, compute)
    u = kept(up_codes + start, up_scales + scale_start, place, scale_place, inside, inside_rows, compute)
    dy = tl.load(grad + start + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = sigmoid * g
    product = silu * u
    if WEIGHTED:
        w = tl.load(weight + first + row, mask=inside_rows, other=0.0)
        product *= w
        dy *= w
    write_columns(
        product.to(compute).to(tl.float32), out, out_scales, tile, first, rows_left, cols, column_stride, column_tiles,
        POWER_OF_TWO, EXPERTS > 0, WIDTH,
    )
    write_columns(
        (dy * u * (sigmoid * (1 + g * (1 - sigmoid)))).to(compute).to(tl.float32), dgate, dgate_scales,
        tile, first, rows_left, cols, column_stride, column_tiles, POWER_OF_TWO, EXPERTS > 0, WIDTH,
    )
    write_columns(
        (dy * silu).to(compute).to(tl.float32), dup, dup_scales, tile, first, rows_left, cols,
        column_stride, column_tiles, POWER_OF_TWO, EXPERTS > 0, WIDTH,
    )


def swiglu_backward_quantize(
    grad: torch.Tensor, gate: Codes, up: Codes, weight: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None, power_of_two: bool = True,
) -> tuple[Codes, tuple[Codes, Codes], tuple[Codes, Codes], torch.Tensor | None]:
    """grad [rows, n] BF16 or FP32 of the weighted product; gate, up as forward kept them.

    -> the product in columns; dgate and dup each in rows and in columns; dweight FP32 [rows] or None. Columns are those
    of `tiles.quantize_columns` for `offsets`.
    """
    (rows, cols), tiles, columns = grad.shape, -(-grad.shape[1] // TILE), column_tiles(grad.shape[0], offsets)
    stride, experts = (rows, 0) if offsets is None else (columns * TILE, len(offsets))
    by_rows = [_room(grad, (rows, cols), (rows, tiles)) for _ in range(2)]
    by_columns = [_room(grad, (cols, stride), (cols, columns)) for _ in range(3)]
    parts = None if weight is None else grad.new_empty(rows, tiles, dtype=torch.float32)
    if rows and cols:
        inputs = (grad.contiguous(), *gate, *up, weight)
        swiglu_backward_rows_kernel[(triton.cdiv(rows, ROWS), tiles)](
            *inputs, *by_rows[0], *by_rows[1], parts, rows, cols, tiles,
            POWER_OF_TWO=power_of_two, WEIGHTED=weight is not None, ROWS=ROWS,
        )
        swiglu_backward_columns_kernel[(columns, triton.cdiv(cols, WIDTH))](
            *inputs, *by_columns[0], *by_columns[1], *by_columns[2],
            offsets, experts, rows, cols, tiles, stride, columns,
            POWER_OF_TWO=power_of_two, WEIGHTED=weight is not None,
            EXPERTS=triton.next_power_of_2(experts) if experts else 0, WIDTH=WIDTH, num_warps=8,
        )
    dweight = None if parts is None else parts.sum(-1)
    return by_columns[0], (by_rows[0], by_columns[1]), (by_rows[1], by_columns[2]), dweight


def _room(x: torch.Tensor, codes: tuple[int, int], scales: tuple[int, int]) -> Codes:
    """Unwritten codes and scales of these shapes."""
    return x.new_empty(codes, dtype=FP8), x.new_empty(scales, dtype=torch.float32)
