"""E4M3 activations and gradients: one FP32 scale per 128 elements of the contraction dimension (REFERENCE §3).

    rows      1x128 tiles along the last dimension, for Fprop (x) and Dgrad (dy):
              x [rows, cols] -> codes [rows, cols], scale [rows, ⌈cols/128⌉]
    columns   128x1 tiles along the rows, for Wgrad, whose contraction runs over the rows, given back transposed:
              x [rows, cols] -> codes [cols, rows], scale [cols, tiles]

Last tiles are ragged. Where rows belong to experts, a column's tiles start anew at every expert, so no scale mixes two
experts: with s the first row of expert e, its j-th tile is number ⌊s/128⌋ + e + j of ⌊rows/128⌋ + experts. These numbers
leave gaps but need nothing from the host; the scale of a tile without rows is 1. Ungrouped rows are as those of one
expert, but without the gap: ⌈rows/128⌉ tiles.

Scales: see `fp8_scales`. This is the plain PyTorch definition, which faster kernels equal bit by bit.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.fp8_scales import FP8, TILE, rounded_e4m3, scale_of, to_e4m3
from dstrain.precision.pointwise import kernel


def quantize_rows(x: torch.Tensor, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16 -> E4M3 [rows, cols], FP32 scale [rows, ⌈cols/128⌉]."""
    codes, scale = _tile_codes(split_rows(x, TILE), power_of_two)
    return join_rows(codes, *x.shape), scale.view(len(x), -(-x.shape[1] // TILE))


@kernel
def _tile_codes(tiles, power_of_two):
    """[n, 128] -> E4M3 [n, 128], scale [n, 1]."""
    _require_width(tiles, TILE)
    wide = tiles.float()
    scale = scale_of(wide.abs().amax(-1, keepdim=True), power_of_two)
    return to_e4m3(wide, scale), scale


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [rows, cols], scale [rows, ⌈cols/128⌉] -> [rows, cols] in `dtype`; an FP32 product, rounded once."""
    return join_rows(tile_values(split_rows(codes, TILE), scale.reshape(-1, 1), dtype), *codes.shape)


@kernel
def tile_values(codes, scale, dtype):
    """codes [n, 128], scale [n, 1] -> [n, 128] in `dtype`."""
    _require_width(codes, TILE)
    return (codes.float() * scale).to(dtype)


def rounded_rows(x: torch.Tensor, power_of_two: bool, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_rows` of `quantize_rows`, in one pass."""
    return join_rows(_tile_rounded(split_rows(x, TILE), power_of_two, dtype)[0], *x.shape)


@kernel
def _tile_rounded(tiles, power_of_two, dtype):
    """-> values and what they were made with: what is returned is computed once, not again for every element."""
    _require_width(tiles, TILE)
    scale = scale_of(tiles.float().abs().amax(-1, keepdim=True), power_of_two)
    inverse = 1 / scale
    return rounded_e4m3(tiles, scale, inverse if power_of_two else None).to(dtype), scale, inverse


def split_rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, cols] -> [rows · ⌈cols/width⌉, width], ragged tiles filled up with zeros: a view where there are none.

    Kernels work on tiles because torch.compile then makes one program for every number of columns.
    """
    if x.shape[1] % width:
        whole = x.new_empty(len(x), -(-x.shape[1] // width) * width)
        whole[:, : x.shape[1]] = x
        whole[:, x.shape[1] :] = 0
        x = whole
    return x.reshape(-1, width)


def join_rows(tiles: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `split_rows`."""
    if rows == 0:
        return tiles.new_empty(0, cols)
    return tiles.view(rows, -1)[:, :cols].contiguous()


def _require_width(tiles, width):
    if tiles.shape[1] != width:  # for the compiler, which takes no size for granted otherwise
        raise ValueError(f"tiles of {tiles.shape[1]}, not {width}")


def quantize_columns(
    x: torch.Tensor, offsets: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16, offsets int32 [experts] the ends of their rows -> E4M3 [cols, rows], FP32 scale
    [cols, tiles], both contiguous; tiles as `column_tiles` counts them."""
    codes, scale = column_codes(x, offsets, power_of_two)
    return codes.t().contiguous(), scale.t().contiguous()


def column_codes(
    x: torch.Tensor, offsets: torch.Tensor | None, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_columns` in the layout of x: -> E4M3 [rows, cols], FP32 scale [tiles, cols]."""
    if len(x) == 0:
        return x.to(FP8), x.new_ones(column_tiles(0, offsets), x.shape[1], dtype=torch.float32)
    return _column_codes(x, *tile_bounds(len(x), offsets, x.device), power_of_two)


@kernel
def _column_codes(x, first, end, tile_of_row, power_of_two):
    scale = scale_of(column_amax(x, first, end), power_of_two)
    return to_e4m3(x.float(), scale[tile_of_row]), scale


def rounded_columns(
    x: torch.Tensor, bounds: tuple[torch.Tensor, torch.Tensor, torch.Tensor], power_of_two: bool
) -> torch.Tensor:
    """`dequantize_columns` of `quantize_columns` in FP32 and in the layout of x, in one pass; `bounds`: `tile_bounds`."""
    return _column_rounded(x, *bounds, power_of_two)[0] if len(x) else x.float()


@kernel
def _column_rounded(x, first, end, tile_of_row, power_of_two):
    scale = scale_of(column_amax(x, first, end), power_of_two)
    inverse = 1 / scale
    values = rounded_e4m3(x, scale[tile_of_row], inverse[tile_of_row] if power_of_two else None)
    return values, scale, inverse  # see _tile_rounded


def column_amax(x: torch.Tensor, first: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """x [rows, cols], the bounds of the tiles [tiles] -> FP32 [tiles, cols]."""
    row = first.unsqueeze(-1) + torch.arange(TILE, device=x.device)  # [tiles, 128]
    inside = row < end.unsqueeze(-1)
    return torch.where(inside.unsqueeze(-1), x[torch.where(inside, row, 0)].float().abs(), 0.0).amax(1)


@kernel
def _column_values(codes, scale, tile_of_row, dtype):
    return (codes.float() * scale[tile_of_row]).to(dtype)


def dequantize_columns(
    codes: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """codes [cols, rows], scale [cols, tiles] -> [cols, rows] in `dtype`; an FP32 product, rounded once."""
    _, _, tile_of_row = tile_bounds(codes.shape[1], offsets, codes.device)
    return _column_values(codes.t(), scale.t(), tile_of_row, dtype).t()


def requantize_columns(
    codes: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Wgrad takes from activations that were kept as 1x128 tiles: dequantised to FP32, then as `quantize_columns`.

    codes E4M3 [rows, cols], scale [rows, ⌈cols/128⌉] -> E4M3 [cols, rows], FP32 scale [cols, tiles].
    """
    return quantize_columns(dequantize_rows(codes, scale, torch.float32), offsets, power_of_two)


def column_tiles(rows: int, offsets: torch.Tensor | None) -> int:
    """Number of tiles of a column of `rows` rows."""
    return -(-rows // TILE) if offsets is None else rows // TILE + len(offsets)


def tile_bounds(
    rows: int, offsets: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first row and the end of each tile, int64 [tiles] (empty: first >= end), and the tile of each row, int64 [rows].

    Rows behind the last offset belong to nobody; they are given the last expert's last tile or the one after it.
    """
    row, tile = torch.arange(rows, device=device), torch.arange(column_tiles(rows, offsets), device=device)
    if offsets is None:
        return tile * TILE, (tile * TILE + TILE).clamp_max(rows), row // TILE
    ends = offsets.long()
    starts = F.pad(ends[:-1], (1, 0))
    base = starts // TILE + torch.arange(len(ends), device=device)  # the first tile of each expert
    expert = torch.searchsorted(base, tile, right=True) - 1
    first = starts[expert] + (tile - base[expert]) * TILE
    expert_of_row = torch.searchsorted(ends, row, right=True).clamp_max(len(ends) - 1)
    tile_of_row = base[expert_of_row] + (row - starts[expert_of_row]) // TILE
    return first, torch.minimum(first + TILE, ends[expert]), tile_of_row.clamp_max(len(tile) - 1)
