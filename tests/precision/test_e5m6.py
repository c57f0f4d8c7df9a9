"""E5M6: right values from the format's definition, number by number, and from FP16, whose upper 12 bits it is."""

import pytest
import torch

from dstrain.precision.e5m6 import dequantize_e5m6, e5m6_to_columns, pack, quantize_e5m6, rounded, unpack
from dstrain.precision.fp8_tiles import dequantize_columns, quantize_columns

CODES = torch.arange(4096, dtype=torch.int32)
CODES = CODES[(CODES & 0x7C0) != 0x7C0]  # the exponent 31 does not occur


def decode(codes):
    """int32 [n] -> FP32, by way of the bytes, two codes in three."""
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    a, b = pairs.unbind(-1)
    packed = torch.stack((a & 0xFF, (a >> 8) | ((b & 0xF) << 4), b >> 4), dim=-1).to(torch.uint8)
    return unpack(packed.view(1, -1), len(codes))[0].float()


def encode(values):
    """The inverse, of any FP32 numbers."""
    a, b, c = pack(rounded(values).half().unsqueeze(0))[0].to(torch.int32).view(-1, 3).unbind(-1)
    return torch.stack((a | ((b & 0xF) << 8), (b >> 4) | (c << 4)), dim=-1).flatten()[: len(values)]


def test_codes_are_sign_five_bits_of_exponent_and_six_of_mantissa():
    for code in range(0, 0x7C0, 5):
        exponent, mantissa = code >> 6, code & 63
        value = (64 + mantissa) * 2.0 ** (exponent - 21) if exponent else mantissa * 2.0**-20
        assert decode(torch.tensor([code, code | 0x800], dtype=torch.int32)).tolist() == [value, -value]
    assert decode(torch.tensor([0x7BF], dtype=torch.int32)).item() == 65024.0


def test_every_code_comes_back():
    assert torch.equal(encode(decode(CODES)), CODES)


def test_encoding_rounds_to_nearest_even():
    """Between two neighbours: below the middle down, above it up, the middle itself to the even code."""
    low, high = decode(CODES[:0x7BF]).double(), decode(CODES[1:0x7C0]).double()
    middle = ((low + high) / 2).float()  # exact in FP32
    even = torch.where(CODES[:0x7BF] % 2 == 0, CODES[:0x7BF], CODES[1:0x7C0])
    infinity = torch.tensor(torch.inf)
    for sign, bit in ((1, 0), (-1, 0x800)):
        assert torch.equal(encode(sign * middle), even | bit)
        assert torch.equal(encode(sign * torch.nextafter(middle, -infinity)), CODES[:0x7BF] | bit)
        assert torch.equal(encode(sign * torch.nextafter(middle, infinity)), CODES[1:0x7C0] | bit)


@pytest.mark.parametrize("cols", [1, 2, 7, 128, 133])
def test_two_codes_lie_in_three_bytes(cols):
    """By Python's own numbers: a + 4096 b, the lowest byte first."""
    codes = CODES[torch.randint(0, len(CODES), (5, cols), generator=torch.Generator().manual_seed(0))]
    numbers = (codes << 4).to(torch.int16).view(torch.float16)
    packed = pack(numbers)
    assert packed.dtype == torch.uint8 and packed.shape == (5, 3 * -(-cols // 2))
    for row, right in zip(packed.tolist(), codes.tolist()):
        pairs = zip(right[::2], [*right[1::2], 0])
        assert bytes(row) == b"".join((a | b << 12).to_bytes(3, "little") for a, b in pairs)
    assert torch.equal(unpack(packed, cols).view(torch.int16), numbers.view(torch.int16))


@pytest.mark.parametrize("shape", [(3, 128), (5, 133), (2, 1)])
def test_values_within_the_normal_range_are_off_by_half_a_step_at_most(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(shape[0]).unsqueeze(-1)
    packed, scale = quantize_e5m6(x)
    assert torch.equal(scale, 2.0 ** torch.log2(scale).round()) and scale.shape == (shape[0], -(-shape[1] // 128))
    back = dequantize_e5m6(packed, scale, shape[1], torch.float64)
    assert ((back / x - 1).abs() <= 2**-7 * (1 + 1e-6)).all()
    assert torch.equal(dequantize_e5m6(packed, scale, shape[1], torch.bfloat16).double(), back)  # exact in BF16


def test_bf16_numbers_are_rounded_as_any_others_are():
    """Every BF16 number up to the largest of E5M6: FP32 holds the sum that rounds it."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= 65024]
    assert len(values) > 36000 and torch.equal(encode(values), encode(rounded(values, short=True)))


def test_zeros_nan_and_infinity():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[0], x[1, 5], x[2, 200] = 0, torch.nan, -torch.inf
    packed, scale = quantize_e5m6(x)
    assert (scale[0] == 1).all() and not packed[0].any()
    back = dequantize_e5m6(packed, scale, 256, torch.float32)
    assert back[1, :128].isnan().all() and back[2, 128:].isnan().all() and back.isnan().sum() == 256
    back = dequantize_columns(*e5m6_to_columns(packed, scale, 256), None, torch.float32)
    assert back.isnan().all()  # a column's tile holds all four rows


def test_columns_are_exact_in_e5m6s_normal_range_else_within_half_a_subnormal_step_and_rounded_once():
    """One large row makes the scale of every column's tile: of the others, small values fall below the normal range."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 130, generator=generator) * 2.0 ** torch.randint(-34, 1, (128, 1), generator=generator)
    packed, scale = quantize_e5m6(x)
    kept = dequantize_e5m6(packed, scale, 130, torch.float64)
    column_scale = 2.0 ** torch.ceil(torch.log2(kept.abs().amax(0) / 65024))  # float64, of each column's only tile
    step = column_scale * 2.0**-20
    moved = torch.where(kept.abs() >= column_scale * 2.0**-14, kept, (kept / step).round() * step)
    assert ((moved != kept).sum() > 100) and ((moved - kept).abs() <= step / 2).all()
    expected = quantize_columns(moved.float())
    mine = e5m6_to_columns(packed, scale, 130)
    assert torch.equal(mine[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(mine[1], expected[1])
