"""E4M3 in 1x128 and 128x1 tiles: `fp8_tiles` as kernels, which write both orientations from one read.

Columns of experts come in a layout of their own: every tile is filled up with zeros to 128, [cols, 128 · tiles] (see
`fill_tiles`), so that a product finds each tile at a whole 16 bytes wherever the experts' rows end.
"""

import torch
import triton
import triton.language as tl

from dstrain.precision.fp8_scales import FP8, TILE
from dstrain.precision.fp8_tiles import column_tiles, tile_bounds
from dstrain.precision.kernels.formats import E4M3, magnitude, scale_of, to_e4m3

ROWS = 32  # rows of 128 that one program of the row kernels takes


@triton.jit
def write_rows(values, codes, scales, row, rows_left, column, cols, tiles, POWER_OF_TWO: tl.constexpr):
    """Quantise values FP32 [·, 128], zero outside, by rows and write them from the pointers' row on.

    `codes` points at column 0, `scales` at the tile. Addresses counted from there fit into 32 bits.
    """
    scale = scale_of(tl.max(magnitude(values), axis=1, keep_dims=True), POWER_OF_TWO, E4M3)
    inside = (row < rows_left) & (column < cols)
    tl.store(codes + row * cols + column, to_e4m3(values, scale, POWER_OF_TWO), mask=inside)
    tl.store(scales + row * tiles, scale, mask=row < rows_left)


@triton.jit
def quantize_rows_kernel(x, codes, scales, rows, cols, x_stride, tiles, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr):
    first, rows_left = tl.program_id(0).to(tl.int64) * ROWS, rows - tl.program_id(0) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    inside = (row < rows_left) & (column < cols)
    values = tl.load(x + first * x_stride + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scales += first * tiles + tl.program_id(1)
    write_rows(values, codes + first * cols, scales, row, rows_left, column, cols, tiles, POWER_OF_TWO)


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless each row is contiguous: gradients may come transposed or expanded."""
    return x if x.stride(-1) == 1 else x.contiguous()


def quantize_rows(x: torch.Tensor, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_tiles.quantize_rows`: x [rows, cols] FP32 or BF16 -> E4M3 [rows, cols], FP32 scale [rows, ⌈cols/128⌉]."""
    x, (rows, cols), tiles = with_rows(x), x.shape, -(-x.shape[1] // TILE)
    codes, scales = x.new_empty(rows, cols, dtype=FP8), x.new_empty(rows, tiles, dtype=torch.float32)
    if x.numel():
        grid = (triton.cdiv(rows, ROWS), tiles)
        quantize_rows_kernel[grid](x, codes, scales, rows, cols, x.stride(0), tiles, power_of_two, ROWS)
    return codes, scales


@triton.jit
def dequantize_rows_kernel(codes, scales, out, rows, cols, tiles, ROWS: tl.constexpr):
    first, rows_left = tl.program_id(0).to(tl.int64) * ROWS, rows - tl.program_id(0) * ROWS
    row, column = tl.arange(0, ROWS)[:, None], (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    place, inside = row * cols + column, (row < rows_left) & (column < cols)
    scale = tl.load(scales + first * tiles + tl.program_id(1) + row * tiles, mask=row < rows_left, other=0.0)
    values = tl.load(codes + first * cols + place, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(out + first * cols + place, values.to(out.dtype.element_ty), mask=inside)


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`fp8_tiles.dequantize_rows`: codes [rows, cols], scale [rows, ⌈cols/128⌉] -> [rows, cols] in `dtype`."""
    (rows, cols), tiles = codes.shape, scale.shape[1]
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    if codes.numel():
        grid = (triton.cdiv(rows, ROWS), tiles)
        dequantize_rows_kernel[grid](codes.contiguous(), scale.contiguous(), out, rows, cols, tiles, ROWS)
    return out


@triton.jit
def rows_of_tile(tile, offsets, experts, rows, EXPERTS: tl.constexpr):
    """The tile's first row and how many of the 128 from there on are its own (none or fewer: a gap)."""
    if EXPERTS == 0:
        first = tile * 128
        return first, rows - first
    else:
        expert = tl.arange(0, EXPERTS)
        ends = tl.load(offsets + expert, mask=expert < experts, other=0)
        begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
        first_tile = begins // 128 + expert  # grows with the expert
        mine = tl.sum(((first_tile <= tile) & (expert < experts)).to(tl.int32), axis=0) - 1
        this = expert == mine
        first = tl.sum(tl.where(this, begins + (tile - first_tile) * 128, 0), axis=0)
        return first, tl.sum(tl.where(this, ends, 0), axis=0) - first


@triton.jit
def write_columns(
    values, codes, scales, tile, first, rows_left, cols, codes_stride, tiles,
    POWER_OF_TWO: tl.constexpr, FILL: tl.constexpr, WIDTH: tl.constexpr = 128,
):
    """Quantise values FP32 [128 rows, WIDTH columns], zero outside, by columns and write them transposed."""
    first_column, columns_left = tl.program_id(1).to(tl.int64) * WIDTH, cols - tl.program_id(1) * WIDTH
    column, turned_column = tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH)[:, None]
    turned_row = tl.arange(0, 128)[None, :]
    scale = scale_of(tl.max(magnitude(values), axis=0, keep_dims=True), POWER_OF_TWO, E4M3)
    tl.store(scales + first_column * tiles + tile + column * tiles, scale, mask=column < columns_left)
    turned, inside = tl.trans(to_e4m3(values, scale, POWER_OF_TWO)), turned_column < columns_left
    codes += first_column * codes_stride + (tile * 128 if FILL else first)
    # 128 columns of up to 2^24 rows each: 32 bits hold these addresses
    place = codes + turned_column * codes_stride + turned_row
    if FILL:  # zeros, not NaN, also where the scale is NaN
        tl.store(place, tl.where(turned_row < rows_left, turned, tl.zeros((WIDTH, 128), tl.float8e4nv)), mask=inside)
    else:
        tl.store(place, turned, mask=inside & (turned_row < rows_left))


@triton.jit
def quantize_columns_kernel(
    x, x_scales, row_codes, row_scales, column_codes, column_scales, offsets, experts, rows, cols, x_stride, x_tiles,
    column_stride, tiles,
    POWER_OF_TWO: tl.constexpr, DEQUANTIZE: tl.constexpr, BOTH: tl.constexpr, EXPERTS: tl.constexpr,
):
    """One 128x128 tile of x. DEQUANTIZE: x is E4M3 with x_scales. BOTH: write rows too."""
    tile = tl.program_id(0)
    first, rows_left = rows_of_tile(tile, offsets, experts, rows, EXPERTS)
    row, column = tl.arange(0, 128)[:, None], (tl.program_id(1) * 128 + tl.arange(0, 128))[None, :]
    inside = (row < rows_left) & (column < cols)
    start, scale_start = first.to(tl.int64), first.to(tl.int64) * x_tiles + tl.program_id(1)
    values = tl.load(x + start * x_stride + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if DEQUANTIZE:
        values *= tl.load(x_scales + scale_start + row * x_tiles, mask=row < rows_left, other=0.0)
    if BOTH:
        write_rows(
            values, row_codes + start * cols, row_scales + scale_start, row, rows_left, column, cols, x_tiles,
            POWER_OF_TWO,
        )
    write_columns(
        values, column_codes, column_scales, tile, first, rows_left, cols, column_stride, tiles,
        POWER_OF_TWO, EXPERTS > 0,
    )


def quantize_columns(
    x: torch.Tensor, offsets: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_tiles.quantize_columns`, with offsets `fill_tiles` of it: -> E4M3 [cols, rows or 128 · tiles], FP32 scale
    [cols, tiles]."""
    return _columns(x, None, offsets, power_of_two)[1]


def quantize_both(
    x: torch.Tensor, offsets: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`quantize_rows` and `quantize_columns` from one read of x. Rows that belong to no expert are left unwritten."""
    return _columns(x, None, offsets, power_of_two, both=True)


def requantize_columns(
    codes: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8_tiles.requantize_columns`, with offsets `fill_tiles` of it: 1x128 tiles [rows, cols] -> 128x1 tiles."""
    return _columns(codes, scale.contiguous(), offsets, power_of_two)[1]


def _columns(x, x_scales, offsets, power_of_two, both=False):
    x, (rows, cols), x_tiles, tiles = with_rows(x), x.shape, -(-x.shape[1] // TILE), column_tiles(x.shape[0], offsets)
    new, wide = (lambda *size: x.new_empty(*size, dtype=FP8)), (lambda *size: x.new_empty(*size, dtype=torch.float32))
    row_codes, row_scales = (new(rows, cols), wide(rows, x_tiles)) if both else (None, None)
    stride, experts = (rows, 0) if offsets is None else (tiles * TILE, len(offsets))
    column_codes, column_scales = new(cols, stride), wide(cols, tiles)
    if tiles and cols:
        quantize_columns_kernel[(tiles, x_tiles)](
            x, x_scales, row_codes, row_scales, column_codes, column_scales, offsets, experts, rows, cols,
            x.stride(0), x_tiles, stride, tiles,
            POWER_OF_TWO=power_of_two, DEQUANTIZE=x_scales is not None, BOTH=both,
            EXPERTS=triton.next_power_of_2(experts) if experts else 0, num_warps=8,
        )
    return (row_codes, row_scales), (column_codes, column_scales)


def fill_tiles(codes: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Columns of experts as `fp8_tiles` lays them out, E4M3 [cols, rows] -> [cols, 128 · tiles], a tile at every 128.

    Plain PyTorch. Places of a tile that no row has, and tiles without rows, hold zeros.
    """
    rows = codes.shape[1]
    first, _, tile = tile_bounds(rows, offsets, codes.device)
    row = torch.arange(rows, device=codes.device)
    known = row[row < offsets[-1]]
    place = tile[known] * TILE + known - first[tile[known]]
    filled = codes.new_zeros(codes.shape[0], len(first) * TILE, dtype=torch.uint8)
    filled[:, place] = codes.view(torch.uint8)[:, known]
    return filled.view(FP8)
