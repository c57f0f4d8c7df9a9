"""1x128 and 128x1 tiles of E4M3: right values from the rule written out tile by tile with exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch

from dstrain.precision.fp8_scales import E4M3_MAX, E5M6_MAX, FP8, rounded_e4m3, scale_of
from dstrain.precision.fp8_tiles import (
    column_tiles, dequantize_columns, dequantize_rows, quantize_columns, quantize_rows, requantize_columns,
)

SHAPES = [(1, 1), (3, 128), (133, 192), (128, 130), (257, 384), (2, 576), (0, 128)]  # FAULTS B08 among them


def adversarial(rows, cols, dtype=torch.float32, seed=0):
    """Magnitudes from 1e-30 to 1e30, zeros, and a zero tile."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=draw) * 10.0 ** torch.randint(-30, 31, (rows, 1), generator=draw)
    x = x * (torch.rand(rows, cols, generator=draw) > 0.1)
    x[rows // 2 :, :128] = 0
    return x.to(dtype)


def e4m3_values():
    """Every finite non-negative E4M3 number, from its definition: 4 bits of exponent (bias 7), 3 of mantissa, S.1111.111 NaN."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)


def nearest_even(x):
    """float64 magnitudes up to 448 -> the nearest E4M3 number, ties to the even code."""
    values = e4m3_values()
    above = torch.searchsorted(values, x).clamp_max(len(values) - 1)
    below = (above - 1).clamp_min(0)
    low, high = x - values[below], values[above] - x
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up | (values[above] == x), values[above], values[below])


def exact_scale(amax: float, power_of_two: bool) -> float:
    if amax == 0:
        return 1.0
    if not power_of_two:
        return max(float(torch.tensor(amax, dtype=torch.float32) / 448), 2.0**-126)
    exponent = -126
    while Fraction(2) ** exponent * 448 < Fraction(amax):
        exponent += 1
    return 2.0**exponent


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_quantised_tile_by_tile_also_the_ragged_last_one(shape, power_of_two, dtype):
    x = adversarial(*shape, dtype)
    codes, scale = quantize_rows(x, power_of_two)
    assert codes.dtype == FP8 and codes.shape == x.shape and scale.shape == (shape[0], math.ceil(shape[1] / 128))
    back = dequantize_rows(codes, scale, torch.float32)
    for row in range(0, shape[0], 7):
        for tile in range(scale.shape[1]):
            part = x[row, 128 * tile : 128 * tile + 128].float()
            expected = exact_scale(part.abs().max().item(), power_of_two)
            assert scale[row, tile].item() == expected
            quotient = (part / torch.tensor(expected)).double()  # one FP32 rounding, none for powers of two
            rounded = torch.copysign(nearest_even(quotient.abs()), quotient)
            assert torch.equal(codes[row, 128 * tile : 128 * tile + 128].double(), rounded)
            assert torch.equal(back[row, 128 * tile : 128 * tile + 128], rounded.float() * expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_columns_are_the_rows_of_the_transpose(shape, power_of_two):
    x = adversarial(*shape)
    codes, scale = quantize_columns(x, None, power_of_two)
    expected, expected_scale = quantize_rows(x.t().contiguous(), power_of_two)
    assert codes.is_contiguous() and scale.is_contiguous() and torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    back = dequantize_columns(codes, scale, None, torch.float32)
    assert torch.equal(back, dequantize_rows(expected, expected_scale, torch.float32))


@pytest.mark.parametrize("counts", [[128, 130, 65], [0, 1, 0, 127], [0, 0, 0, 0], [5], [300, 0, 1], [127, 129, 128, 0]])
def test_columns_of_an_expert_are_those_of_its_rows_alone(counts):
    """FAULTS B11. Where an expert's tiles lie: from tile ⌊first row / 128⌋ + expert on; other tiles have scale 1."""
    x = adversarial(sum(counts), 130)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    codes, scale = quantize_columns(x, offsets)
    assert codes.shape == (130, sum(counts)) and scale.shape == (130, sum(counts) // 128 + len(counts))
    assert scale.shape[1] == column_tiles(sum(counts), offsets)
    unused, start = torch.ones(scale.shape[1], dtype=torch.bool), 0
    for expert, count in enumerate(counts):
        alone, alone_scale = quantize_columns(x[start : start + count])
        first = start // 128 + expert
        tiles = slice(first, first + math.ceil(count / 128))
        assert torch.equal(codes[:, start : start + count].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scale[:, tiles], alone_scale) and unused[tiles].all()
        unused[tiles] = False
        start += count
    assert (scale[:, unused] == 1).all()
    back = dequantize_columns(codes, scale, offsets, torch.float32)
    assert (back - x.t()).abs().max() <= 0.07 * x.abs().max() if x.numel() else True


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_tile_with_nan_or_infinity_becomes_nan_and_its_neighbours_do_not(power_of_two, bad):
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    x[3, 130] = bad
    codes, scale = quantize_rows(x, power_of_two)
    assert (codes[3, 128:256].view(torch.uint8) == 0x7F).all()
    hit = dequantize_rows(codes, scale, torch.bfloat16).isnan()
    assert hit[3, 128:256].all() and hit.sum() == 128
    hit = dequantize_columns(*quantize_columns(x, None, power_of_two), None, torch.float32).isnan()
    assert hit[130, :128].all() and hit.sum() == 128
    hit = dequantize_columns(*requantize_columns(codes, scale), None, torch.float32).isnan()
    assert hit[128:256, :128].all() and hit.sum() == 128 * 128


@pytest.mark.parametrize("power_of_two", [True, False])
def test_scaling_by_a_power_of_two_scales_the_scales_and_leaves_the_codes(power_of_two):
    """No floor: gradients of a mean over 60M tokens are near 1e-10, and 2^-40 further down nothing may change."""
    x = torch.randn(130, 260, generator=torch.Generator().manual_seed(0)) * 1e-10
    for quantize in (quantize_rows, lambda x, p: quantize_columns(x, None, p)):
        codes, scale = quantize(x, power_of_two)
        small, small_scale = quantize(x * 2.0**-40, power_of_two)
        assert torch.equal(codes.view(torch.uint8), small.view(torch.uint8))
        assert torch.equal(small_scale, scale * 2.0**-40)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_largest_and_the_smallest_numbers_keep_finite_scales(power_of_two):
    largest = 247 * 2.0**120  # from 248 on a number is rounded to 2^128, which FP32 cannot hold
    x = torch.tensor([[largest, -largest / 3], [2.0**-149, -(2.0**-140)], [2.0**-117, 1e-36]])
    codes, scale = quantize_rows(x, power_of_two)
    back = dequantize_rows(codes, scale, torch.float64)
    assert scale.isfinite().all() and (1 / scale).isfinite().all() and back.isfinite().all()
    assert (back[0] / x[0].double() - 1).abs().max() < 2**-4
    assert (back - x.double()).abs()[1:].max() <= 2.0**-126 * 2**-4 * 448


def test_the_exponent_is_exact_at_the_border_of_each_format():
    for largest in (E4M3_MAX, E5M6_MAX):
        for exponent in (-100, -3, 0, 57):
            border = largest * 2.0**exponent
            amax = torch.tensor([border, math.nextafter(border, math.inf)], dtype=torch.float64)
            amax = torch.stack((amax[0].float(), torch.nextafter(amax[0].float(), torch.tensor(torch.inf))))
            assert scale_of(amax, True, largest).tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


@pytest.mark.parametrize("exponent", [-126, -40, 0, 7, 119])
def test_every_bf16_number_is_rounded_to_the_nearest_e4m3_number(exponent):
    """Without a cast, under a power of two; `nearest_even` decides."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scale = torch.tensor(2.0**exponent)
    values = values[values.double().abs() <= 448 * scale.double()]
    assert len(values) > 2 * 128 * 8  # of each sign, E4M3's normal numbers and more
    found = rounded_e4m3(values, scale, 1 / scale)
    wide = values.double() / scale.double()
    assert torch.equal(found.double(), wide.sign() * nearest_even(wide.abs()) * scale.double())


@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-100])
def test_fp32_numbers_beside_e4m3_numbers_and_their_middles_go_to_the_nearest(scale):
    """Values over a scale that is no power of two: FP32's quotient is what is rounded."""
    codes = e4m3_values()
    values = torch.cat((codes, (codes[1:] + codes[:-1]) / 2)).float()
    near = [torch.nextafter(values, torch.tensor(towards)) for towards in (0.0, math.inf)]
    values = torch.cat((values, *near)) * torch.tensor(scale)
    values = torch.cat((values, -values))
    wide = (values / torch.tensor(scale)).double()
    right = (wide.sign() * nearest_even(wide.abs().clamp_max(448.0))).float() * torch.tensor(scale)
    assert torch.equal(rounded_e4m3(values, torch.tensor(scale), None), right)


def test_requantising_is_quantising_what_the_rows_stand_for():
    x = adversarial(260, 130)
    offsets = torch.tensor([100, 100, 260], dtype=torch.int32)
    codes, scale = quantize_rows(x)
    mine = requantize_columns(codes, scale, offsets)
    expected = quantize_columns(dequantize_rows(codes, scale, torch.float32), offsets)
    assert torch.equal(mine[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(mine[1], expected[1])
