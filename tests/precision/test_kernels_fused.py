"""Fused kernels in Triton's interpreter against their compositions in plain PyTorch.

Exponentials and sums may differ in the last bit of FP32, which rounding to BF16 and then to E4M3 rarely makes a
step of one code; a scale would change only if it met the largest value of a tile.
"""

import pytest
import torch
from fp8_cases import adversarial, alike, same

pytest.importorskip("triton")

from dstrain.precision.fp8_tiles import quantize_rows  # noqa: E402
from dstrain.precision.kernels import definitions, permute, rms_norm, swiglu  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


def values(rows, cols, dtype, seed):
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2
    x[:, : cols // 3] *= 30  # saturates the sigmoid
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (70, 200), (130, 256)], ids=str)
def test_swiglu_forward(shape, weighted, dtype):
    gate, up = values(*shape, dtype, 0), values(*shape, dtype, 1)
    weight = values(shape[0], 3, torch.float32, 2)[:, 2].contiguous() if weighted else None
    for power_of_two in (True, False):
        result = swiglu.swiglu_quantize(gate, up, weight, power_of_two)
        expected = definitions.swiglu_quantize(gate, up, weight, power_of_two)
        assert alike(result[0], expected[0]) and same(result[1:], expected[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("counts", [None, [128, 3, 0, 69], [0, 0, 200]], ids=str)
def test_swiglu_backward_gives_what_every_product_of_the_mlp_needs(counts, weighted, dtype):
    shape = 200, 136
    offsets = None if counts is None else torch.tensor(counts).cumsum(0).int()
    gate, up = quantize_rows(values(*shape, dtype, 0)), quantize_rows(values(*shape, dtype, 1))
    grad = values(*shape, dtype, 2)
    weight = values(shape[0], 3, torch.float32, 3)[:, 2].contiguous() if weighted else None
    result = swiglu.swiglu_backward_quantize(grad, gate, up, weight, offsets)
    assert alike(result, definitions.swiglu_backward_quantize(grad, gate, up, weight, offsets))


def test_swiglu_lets_nan_and_infinity_through_to_the_tiles_that_hold_them():
    """A NaN scale makes its whole tile NaN: in rows the row's 128 columns, in columns the column's 128 rows."""
    gate, up = values(40, 256, torch.bfloat16, 0), values(40, 256, torch.bfloat16, 1)
    gate[3, 5], up[7, 200] = torch.nan, torch.inf
    result, expected = swiglu.swiglu_quantize(gate, up), definitions.swiglu_quantize(gate, up)
    assert [scale.isnan().nonzero().tolist() for _, scale in result] == [[[3, 0], [7, 1]], [[3, 0]], [[7, 1]]]
    for (_, scale), (_, other) in zip(result, expected):
        assert alike(scale.nan_to_num(-1.0), other.nan_to_num(-1.0))
    grad = values(40, 256, torch.bfloat16, 2)
    product, (dgate, dgate_columns), (dup, _), _ = swiglu.swiglu_backward_quantize(grad, *result[1:])
    # kept inputs: row 3 is NaN in columns 0 to 127, row 7 in 128 to 255, so every column holds one
    assert product[1].isnan().all() and dgate_columns[1].isnan().all()
    assert dgate[1].isnan().nonzero().tolist() == [[3, 0], [7, 1]]
    assert dup[1].isnan().nonzero().tolist() == [[3, 0]]  # d up does not read up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (9, 130), (20, 576)], ids=str)
def test_rms_norm(shape, dtype):
    """Also where eps is not small beside the mean square."""
    weight = 1 + values(1, shape[1], torch.float32, 1)[0].contiguous()
    for power_of_two, factor in ((True, 1), (False, 1), (True, 1e-4)):
        x = values(*shape, dtype, 0) * factor
        result = rms_norm.rms_norm_quantize(x, weight, 1e-6, power_of_two)
        assert alike(result, definitions.rms_norm_quantize(x, weight, 1e-6, power_of_two))


def test_rows_travel_to_experts_and_back():
    """Permuted rows are the tokens' own bits. Back, a token without rows is zero; sums follow the choices' order."""
    codes, scales = quantize_rows(adversarial(40, 200, torch.bfloat16))
    index = torch.randint(0, 40, (90,), generator=torch.Generator().manual_seed(0))
    for kind in (torch.int32, torch.int64):
        assert same(permute.permute(codes, scales, index.to(kind)), definitions.permute(codes, scales, index))
    assert permute.permute(codes, scales, index[:0])[0].shape == (0, 200)
    slots = torch.randint(-1, 90, (30, 4), generator=torch.Generator().manual_seed(1))
    slots[7] = -1
    for dtype in (torch.bfloat16, torch.float32):
        rows = values(90, 300, dtype, 4)
        result = permute.unpermute(rows, slots)
        assert same(result, definitions.unpermute(rows, slots)) and not result[7].any()
        zero = torch.zeros(300, dtype=torch.float64)
        exact = torch.stack([sum((rows[i].double() for i in token if i >= 0), zero) for token in slots])
        assert torch.allclose(result.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)
