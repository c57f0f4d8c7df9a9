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

from dstrain.precision.fp8_scales import FP8, TILE, scale_of, to_e4m3
from dstrain.precision.pointwise import kernel


@kernel
def quantize_rows(x: torch.Tensor, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16 -> E4M3 [rows, cols], FP32 scale [rows, ⌈cols/128⌉]."""
    cols = x.shape[-1]
    tiles = F.pad(x.float(), (0, -cols % TILE)).unflatten(-1, (-1, TILE))
    scale = scale_of(tiles.abs().amax(-1), power_of_two)
    return to_e4m3(tiles, scale.unsqueeze(-1)).flatten(-2)[:, :cols].contiguous(), scale


@kernel
def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [rows, cols], scale [rows, ⌈cols/128⌉] -> [rows, cols] in `dtype`; an FP32 product, rounded once."""
    tile = torch.arange(codes.shape[-1], device=codes.device) // TILE
    return (codes.float() * scale[:, tile]).to(dtype)


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
    row = first.unsqueeze(-1) + torch.arange(TILE, device=x.device)  # [tiles, 128]
    inside = row < end.unsqueeze(-1)
    tiles = torch.where(inside.unsqueeze(-1), x[torch.where(inside, row, 0)].float().abs(), 0.0)
    scale = scale_of(tiles.amax(1), power_of_two)
    return to_e4m3(x.float(), scale[tile_of_row]), scale


@kernel
def column_values(codes, scale, tile_of_row, dtype):
    """codes [rows, cols], scale [tiles, cols] -> [rows, cols] in `dtype`."""
    return (codes.float() * scale[tile_of_row]).to(dtype)


def dequantize_columns(
    codes: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """codes [cols, rows], scale [cols, tiles] -> [cols, rows] in `dtype`; an FP32 product, rounded once."""
    _, _, tile_of_row = tile_bounds(codes.shape[1], offsets, codes.device)
    return column_values(codes.t(), scale.t(), tile_of_row, dtype).t()


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
