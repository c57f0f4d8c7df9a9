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

from dstrain.precision.fp8_scales import TILE, scale_of, to_e4m3


def quantize_rows(x: torch.Tensor, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16 -> E4M3 [rows, cols], FP32 scale [rows, ⌈cols/128⌉]."""
    cols = x.shape[-1]
    tiles = F.pad(x.float(), (0, -cols % TILE)).unflatten(-1, (-1, TILE))
    scale = scale_of(tiles.abs().amax(-1), power_of_two)
    return to_e4m3(tiles, scale.unsqueeze(-1)).flatten(-2)[:, :cols].contiguous(), scale


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [rows, cols], scale [rows, ⌈cols/128⌉] -> [rows, cols] in `dtype`; an FP32 product, rounded once."""
    return (codes.float() * scale.repeat_interleave(TILE, -1)[:, : codes.shape[-1]]).to(dtype)


def quantize_columns(
    x: torch.Tensor, offsets: torch.Tensor | None = None, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16, offsets int32 [experts] the ends of their rows -> E4M3 [cols, rows], FP32 scale
    [cols, tiles], both contiguous; tiles as `column_tiles` counts them."""
    rows, wide = x.shape[0], x.float()
    places = tile_of_row(rows, offsets, x.device)
    amax = wide.new_zeros(column_tiles(rows, offsets), x.shape[1])
    amax.scatter_reduce_(0, places.unsqueeze(-1).expand_as(wide), wide.abs(), "amax")
    scale = scale_of(amax, power_of_two)
    return to_e4m3(wide, scale[places]).t().contiguous(), scale.t().contiguous()


def dequantize_columns(
    codes: torch.Tensor, scale: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """codes [cols, rows], scale [cols, tiles] -> [cols, rows] in `dtype`; an FP32 product, rounded once."""
    return (codes.float() * scale[:, tile_of_row(codes.shape[1], offsets, codes.device)]).to(dtype)


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


def tile_of_row(rows: int, offsets: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """int64 [rows]: the tile of each row."""
    row = torch.arange(rows, device=device)
    if offsets is None:
        return row // TILE
    ends = offsets.long()
    expert = torch.searchsorted(ends, row, right=True).clamp_max(len(ends) - 1)
    first = F.pad(ends, (1, 0))[expert]  # the first row of the row's expert
    return first // TILE + expert + (row - first) // TILE
