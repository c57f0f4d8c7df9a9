"""Quantiser kernels in Triton's interpreter equal the plain PyTorch definitions bit by bit."""

import pytest
import torch
from fp8_cases import SHAPES, adversarial, same

pytest.importorskip("triton")

from dstrain.precision import e5m6 as e5m6_definition  # noqa: E402
from dstrain.precision import fp8_tiles  # noqa: E402
from dstrain.precision.fp8_blocks import quantize_blocks  # noqa: E402
from dstrain.precision.kernels import blocks, definitions, e5m6, tiles  # noqa: E402

# the largest numbers, rounded up to a code, do leave FP32's range
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply")

TYPES = [torch.bfloat16, torch.float32]
# FAULTS B11: groups that are no multiple of a tile, and experts without rows; the last leaves rows to nobody
OFFSETS = [[128, 258, 323], [0, 1, 1, 128], [0, 0, 0, 0], [5], [0, 384, 384], [100, 256]]


def offsets_of(ends):
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_in_both_orientations_equal_the_definition(shape, power_of_two, dtype):
    x = adversarial(*shape, dtype)
    rows, columns = fp8_tiles.quantize_rows(x, power_of_two), fp8_tiles.quantize_columns(x, None, power_of_two)
    assert same(tiles.quantize_rows(x, power_of_two), rows)
    assert same(tiles.quantize_columns(x, None, power_of_two), columns)
    assert same(tiles.quantize_both(x, None, power_of_two), (rows, columns))
    assert same(tiles.dequantize_rows(*rows, dtype), fp8_tiles.dequantize_rows(*rows, dtype))
    expected = fp8_tiles.requantize_columns(*rows, None, power_of_two)
    assert same(tiles.requantize_columns(*rows, None, power_of_two), expected)


def test_a_row_of_adversarial_values_holds_what_its_name_says():
    """Without this the comparisons above could compare nothing."""
    x = torch.cat([adversarial(*shape, torch.float32).flatten() for shape in SHAPES])
    assert x.isnan().any() and x.isinf().any() and (x == 0).any() and (x.abs() > 1e38).any()
    assert ((x != 0) & (x.abs() < 2.0**-126)).any()


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
def test_columns_of_experts_start_anew_at_every_expert_and_fill_their_tiles_with_zeros(ends):
    offsets = offsets_of(ends)
    x = adversarial(ends[-1], 136, torch.bfloat16)
    expected = definitions.columns(x, offsets)
    assert expected[0].shape[1] == 128 * expected[1].shape[1]
    assert same(tiles.quantize_columns(x, offsets), expected)
    rows = fp8_tiles.quantize_rows(x)
    assert same(tiles.quantize_both(x, offsets), (rows, expected))
    again, scale = fp8_tiles.requantize_columns(*rows, offsets)
    assert same(tiles.requantize_columns(*rows, offsets), (tiles.fill_tiles(again, offsets), scale))


def test_filled_tiles_hold_each_experts_rows_from_a_multiple_of_128_on():
    """Counted by hand: experts of 130, 0 and 3 rows; tiles 0, 1 | 2 (a gap: 130 // 128 + 1) | 3."""
    codes = torch.arange(1, 134).to(torch.uint8).view(1, -1).view(torch.float8_e4m3fn)
    filled = tiles.fill_tiles(codes, offsets_of([130, 130, 133])).view(torch.uint8)[0]
    assert filled.shape == (4 * 128,)
    assert filled[:130].tolist() == list(range(1, 131)) and filled[384:387].tolist() == [131, 132, 133]
    assert filled.count_nonzero() == 133


def test_inputs_need_not_be_contiguous():
    """A part of something, its transpose, and one row or one value seen many times, as the gradient of a sum is."""
    x = adversarial(140, 140, torch.float32)
    for view in (x[:70, 3:133], x.t(), x[:1].expand(70, 140), x[:1, :1].expand(70, 140)):
        rows, columns = fp8_tiles.quantize_rows(view), fp8_tiles.quantize_columns(view)
        assert same(tiles.quantize_rows(view), rows) and same(tiles.quantize_columns(view), columns)
        assert same(tiles.quantize_both(view), (rows, columns))
        assert same(e5m6.quantize_e5m6(view), e5m6_definition.quantize_e5m6(view))
        assert same(blocks.quantize_weight(view)[0], quantize_blocks(view))


def test_scales_step_where_the_largest_value_passes_the_largest_code():
    """448 · 2^k fits a scale of 2^k, the next FP32 number does not; the same for E5M6 at 65024."""
    powers = 2.0 ** torch.arange(-126, 110, 7).unsqueeze(-1)
    for largest, quantize, definition in (
        (448.0, tiles.quantize_rows, fp8_tiles.quantize_rows),
        (65024.0, e5m6.quantize_e5m6, e5m6_definition.quantize_e5m6),
    ):
        exact = largest * powers
        above, below = (torch.nextafter(exact, torch.tensor(limit)) for limit in (torch.inf, 0.0))
        assert torch.equal(quantize(exact)[1], powers) and torch.equal(quantize(below)[1], powers)
        assert torch.equal(quantize(above)[1], 2 * powers)
        for x in (exact, above, below):
            assert same(quantize(x), definition(x))
    x = torch.nextafter(448.0 * powers, torch.tensor(torch.inf))
    assert same(tiles.quantize_rows(x, False), fp8_tiles.quantize_rows(x, False))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 130, 200)])
def test_weights_in_blocks_and_their_transposes_equal_the_definition(shape, power_of_two, dtype):
    weight = adversarial(shape[-2] * (shape[0] if len(shape) == 3 else 1), shape[-1], dtype, seed=1).view(shape)
    codes, scale = quantize_blocks(weight, power_of_two)
    turned = codes.view(torch.uint8).mT.contiguous().view(codes.dtype), scale.mT.contiguous()
    assert same(blocks.quantize_weight(weight, power_of_two), ((codes, scale), turned))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_e5m6_equals_the_definition(shape, dtype):
    x = adversarial(*shape, dtype, seed=2)
    packed = e5m6_definition.quantize_e5m6(x)
    assert same(e5m6.quantize_e5m6(x), packed)
    expected = e5m6_definition.dequantize_e5m6(*packed, shape[1], dtype)
    assert same(e5m6.dequantize_e5m6(*packed, shape[1], dtype), expected)
    for power_of_two in (True, False):
        expected = e5m6_definition.e5m6_to_columns(*packed, shape[1], power_of_two)
        assert same(e5m6.e5m6_to_columns(*packed, shape[1], power_of_two), expected)
