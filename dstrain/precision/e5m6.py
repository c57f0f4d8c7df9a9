"""E5M6 with power-of-two scales per 1x128 tile: how the input of the Linear after attention is kept (REFERENCE §3).

A code has 12 bits, sign, 5 of exponent (bias 15), 6 of mantissa: the upper 12 bits of an FP16 number, subnormals
included. The largest is 65024 = 1.984375 · 2^15. Infinities do not occur, and a NaN only shows in its tile's scale.
Two codes a, b, of columns 2j and 2j + 1, are packed into the bytes

    a[0:8]    a[8:12] | b[0:4] << 4    b[4:12]                (bit 0 is the lowest)

and an odd last column is packed with a zero code.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.fp8_scales import E5M6_MAX, TILE, round_bits, scale_of
from dstrain.precision.fp8_tiles import column_amax, join_rows, quantize_columns, split_rows, tile_bounds, tile_values
from dstrain.precision.pointwise import kernel

PACKED = TILE // 2 * 3  # bytes of a tile


def quantize_e5m6(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, cols] FP32 or BF16 -> packed uint8 [rows, 3 · ⌈cols/2⌉], FP32 scale [rows, ⌈cols/128⌉], powers of two."""
    numbers, scale, _ = _tile_numbers(split_rows(x, TILE))
    rows, cols = x.shape
    return join_rows(pack(numbers.half()), rows, 3 * -(-cols // 2)), scale.view(rows, -(-cols // TILE))


@kernel
def _tile_numbers(tiles):
    """[n, 128] -> the tiles over their scales as E5M6 numbers in FP32, zero for NaN; scale [n, 1] and 1 / scale."""
    scale = scale_of(tiles.float().abs().amax(-1, keepdim=True), True, E5M6_MAX)
    inverse = 1 / scale  # returned, as in fp8_tiles: so it is computed once
    numbers = rounded(tiles.float() * inverse, short=tiles.dtype == torch.bfloat16)
    return torch.where(numbers == numbers, numbers, 0.0), scale, inverse


def rounded(values: torch.Tensor, short: bool = False) -> torch.Tensor:
    """FP32, magnitudes up to 65024 or NaN -> the nearest E5M6 number, ties to the even code. short: BF16's numbers."""
    number = round_bits(values if short else values.double(), 7, 2.0**-14).float()
    return torch.copysign(number, values)  # zeros too


def dequantize_e5m6(packed: torch.Tensor, scale: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """-> [rows, cols] in `dtype`; exact in FP32 and BF16."""
    numbers = unpack(split_rows(packed, PACKED), TILE)
    return join_rows(tile_values(numbers.float(), scale.reshape(-1, 1), dtype), len(packed), cols)


def e5m6_to_columns(
    packed: torch.Tensor, scale: torch.Tensor, cols: int, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """What Wgrad takes: the values first in E5M6 with a scale per 128x1 tile, then rounded once to E4M3 in that tile.

    A tile's largest value becomes its neighbours' scale, so a value that falls below E5M6's normal range is rounded to a
    multiple of its smallest subnormal; every other one is exact. -> E4M3 [cols, rows], FP32 scale [cols, ⌈rows/128⌉].
    """
    return quantize_columns(e5m6_in_columns(packed, scale, cols, torch.float32), None, power_of_two)


def e5m6_in_columns(packed: torch.Tensor, scale: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """-> [rows, cols] in FP32 or BF16, which both hold them: the values moved from 1x128 to 128x1 tiles of E5M6."""
    values = dequantize_e5m6(packed, scale, cols, dtype)
    return _moved(values, *tile_bounds(len(values), None, values.device))[0] if len(values) else values


@kernel
def _moved(values, first, end, tile_of_row):
    scale = scale_of(column_amax(values, first, end), True, E5M6_MAX)
    inverse = 1 / scale
    numbers = rounded(values.float() * inverse[tile_of_row], short=True)
    return (numbers * scale[tile_of_row]).to(values.dtype), scale, inverse


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """E5M6 numbers in FP16, [rows, cols] -> their codes, uint8 [rows, 3 · ⌈cols/2⌉]."""
    cols = numbers.shape[-1]
    pairs = F.pad(numbers, (0, -cols % 8)).contiguous().view(torch.int32)
    return _packed_words(pairs).flatten(-2).view(torch.uint8)[..., : 3 * -(-cols // 2)]


@kernel
def _packed_words(pairs):
    """Two FP16 numbers in each int32 [rows, 4 n] -> four times 24 bits in three int32, [rows, n, 3]; lowest first."""
    a, b, c, d = (((pairs >> 4) & 0xFFF) | ((pairs >> 8) & 0xFFF000)).unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack((a | (b << 24), (b >> 8) | (c << 16), (c >> 16) | (d << 8)), dim=-1)


def unpack(packed: torch.Tensor, cols: int) -> torch.Tensor:
    """uint8 [rows, 3 · ⌈cols/2⌉] -> E5M6 numbers in FP16 [rows, cols]."""
    words = F.pad(packed, (0, -packed.shape[-1] % 12)).contiguous().view(torch.int32)
    return _number_pairs(words.unflatten(-1, (-1, 3))).flatten(-2).view(torch.float16)[..., :cols]


@kernel
def _number_pairs(words):
    """The inverse of `_packed_words`: int32 [rows, n, 3] -> [rows, n, 4]."""
    x, y, z = words.unbind(-1)
    a, b, c, d = x, ((x >> 24) & 0xFF) | (y << 8), ((y >> 16) & 0xFFFF) | (z << 16), z >> 8
    codes = torch.stack((a, b, c, d), dim=-1)
    return ((codes & 0xFFF) << 4) | ((codes & 0xFFF000) << 8)
