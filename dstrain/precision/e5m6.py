"""E5M6 with power-of-two scales per 1x128 tile: how the input of the Linear after attention is kept (REFERENCE §3).

A code has 12 bits, sign, 5 of exponent (bias 15), 6 of mantissa: the upper 12 bits of an FP16 number, subnormals
included. The largest is 65024 = 1.984375 · 2^15. Infinities do not occur, and a NaN only shows in its tile's scale.
Two codes a, b, of columns 2j and 2j + 1, are packed into the bytes

    a[0:8]    a[8:12] | b[0:4] << 4    b[4:12]                (bit 0 is the lowest)

and an odd last column is packed with a zero code.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.fp8_scales import E5M6_MAX, TILE, scale_of
from dstrain.precision.fp8_tiles import column_amax, join_rows, quantize_columns, split_rows, tile_bounds
from dstrain.precision.pointwise import kernel

PACKED = TILE // 2 * 3  # bytes of a tile
_REBIAS = (127 - 15) << 6  # FP32's exponent against E5M6's, in units of the code


def quantize_e5m6(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16 -> packed uint8 [rows, 3 · ⌈cols/2⌉], FP32 scale [rows, ⌈cols/128⌉], powers of two."""
    packed, scale = _packed_tiles(split_rows(x, TILE))
    rows, cols = x.shape
    return join_rows(packed, rows, 3 * -(-cols // 2)), scale.view(rows, -(-cols // TILE))


@kernel
def _packed_tiles(tiles):
    """[n, 128] -> uint8 [n, 192], scale [n, 1]."""
    wide = tiles.float()
    scale = scale_of(wide.abs().amax(-1, keepdim=True), True, E5M6_MAX)
    return pack(encode(wide / scale)), scale


def dequantize_e5m6(packed: torch.Tensor, scale: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """-> [rows, cols] in `dtype`; exact in FP32 and BF16."""
    return join_rows(_unpacked_tiles(split_rows(packed, PACKED), scale.reshape(-1, 1), dtype), len(packed), cols)


@kernel
def _unpacked_tiles(packed, scale, dtype):
    return (decode(unpack(packed, TILE)) * scale).to(dtype)


def e5m6_to_columns(
    packed: torch.Tensor, scale: torch.Tensor, cols: int, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Wgrad takes: the values first in E5M6 with a scale per 128x1 tile, then rounded once to E4M3 in that tile.

    A tile's largest value becomes its neighbours' scale, so a value that falls below E5M6's normal range is rounded to a
    multiple of its smallest subnormal; every other one is exact. -> E4M3 [cols, rows], FP32 scale [cols, ⌈rows/128⌉].
    """
    return quantize_columns(e5m6_in_columns(packed, scale, cols), None, power_of_two)


def e5m6_in_columns(packed: torch.Tensor, scale: torch.Tensor, cols: int) -> torch.Tensor:
    """-> FP32 [rows, cols], the values moved from 1x128 to 128x1 tiles of E5M6."""
    values = dequantize_e5m6(packed, scale, cols, torch.float32)
    return _moved(values, *tile_bounds(len(values), None, values.device))[0] if len(values) else values


@kernel
def _moved(values, first, end, tile_of_row):
    scale = scale_of(column_amax(values, first, end), True, E5M6_MAX)
    of_row = scale[tile_of_row]
    return rounded(values / of_row) * of_row, scale  # returned, so that it is computed once


def encode(values: torch.Tensor) -> torch.Tensor:
    """FP32, magnitudes up to 65024 or NaN -> codes int32 [0, 4096), rounded to nearest even; a NaN's code is 0."""
    bits = rounded(values).view(torch.int32)
    normal = ((bits & 0x7FFFFFFF) >> 17) - _REBIAS
    subnormal = (values.abs() * 2.0**20).round().to(torch.int32)
    code = torch.where(values.abs() < 2.0**-14, subnormal, normal)  # 2^-14 itself is both: 64
    return torch.where(values == values, code | ((bits >> 20) & 0x800), 0)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """FP32, magnitudes up to 65024 or NaN -> the nearest E5M6 number, ties to the even code, in FP32."""
    bits = values.view(torch.int32)
    normal = ((bits + 0xFFFF + ((bits >> 17) & 1)) >> 17 << 17).view(torch.float32)
    subnormal = (values * 2.0**20).round() * 2.0**-20  # the step below 2^-14
    return torch.where(values.abs() < 2.0**-14, subnormal, torch.where(values == values, normal, values))


def decode(codes: torch.Tensor) -> torch.Tensor:
    """codes int32 [0, 4096) -> FP32, exact."""
    return (codes << 4).to(torch.int16).view(torch.float16).float()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """codes [rows, cols] -> uint8 [rows, 3 · ⌈cols/2⌉]."""
    a, b = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a & 0xFF, (a >> 8) | ((b & 0xF) << 4), b >> 4), dim=-1).to(torch.uint8).flatten(-2)


def unpack(packed: torch.Tensor, cols: int) -> torch.Tensor:
    """uint8 [rows, 3 · ⌈cols/2⌉] -> codes int32 [rows, cols]."""
    low, middle, high = packed.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack((low | ((middle & 0xF) << 8), (middle >> 4) | (high << 4)), dim=-1).flatten(-2)[..., :cols]
