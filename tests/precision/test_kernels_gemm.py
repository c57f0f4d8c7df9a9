"""FP8 products in Triton's interpreter, against float64 products of the same quantised operands."""

import pytest
import torch
from fp8_cases import same

pytest.importorskip("triton")

from dstrain.precision.fp8_blocks import dequantize_blocks, quantize_blocks  # noqa: E402
from dstrain.precision.fp8_tiles import dequantize_rows, quantize_rows  # noqa: E402
from dstrain.precision.kernels import definitions, gemm, grouped_gemm  # noqa: E402

SHAPES = [(1, 1, 1), (130, 133, 192), (64, 300, 300), (128, 128, 128), (5, 16, 1000)]


def uneven(*shape, seed):
    """Random, with magnitudes that change by 10 from tile to tile, so that a neighbour's scale would be seen."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    rows, cols = torch.arange(shape[-2]), torch.arange(shape[-1])
    return x * 10.0 ** ((rows.unsqueeze(-1) // 64 + 2 * (cols // 128)) % 5 - 2)


def close(result, a, b, before=0.0):
    """result is before + a bᵀ (float64), each element within 1e-5 of its terms' magnitudes; BF16: and an ulp."""
    expected, size = before + a @ b.t(), a.abs() @ b.abs().t()
    rounding = expected.abs() * 2.0**-8 if result.dtype == torch.bfloat16 else expected.abs() * 1e-6
    assert result.shape == expected.shape and (size > 0).all()
    assert ((result.double() - expected).abs() <= 1e-5 * size + rounding).all()


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_products(shape, power_of_two):
    m, n, k = shape
    x, weight, rows = uneven(m, k, seed=0), uneven(n, k, seed=1), uneven(n, k, seed=2)
    a, tiles = (quantize_rows(y, power_of_two) for y in (x, rows))
    blocks = quantize_blocks(weight, power_of_two)
    wide = dequantize_rows(*a, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(m, n, dtype=dtype)
        gemm.matmul(*a, *blocks, out)
        close(out, wide, dequantize_blocks(*blocks, torch.float64))
    out = uneven(m, n, seed=3)
    before = out.double()
    gemm.matmul(*a, *tiles, out, accumulate=True)
    close(out, wide, dequantize_rows(*tiles, torch.float64), before)


def test_scales_may_be_stored_in_either_order():
    a, b = quantize_rows(uneven(70, 300, seed=0)), quantize_blocks(uneven(40, 300, seed=1))
    plain, turned = torch.empty(70, 40), torch.empty(70, 40)
    gemm.matmul(*a, *b, plain)
    gemm.matmul(a[0], a[1].t().contiguous().t(), b[0], b[1].t().contiguous().t(), turned)
    assert torch.equal(plain, turned)


def test_a_nan_in_an_operand_reaches_the_products_that_it_belongs_to_and_no_other():
    x, weight = uneven(70, 300, seed=0), uneven(40, 300, seed=1)
    x[3, 200] = torch.nan
    out = torch.empty(70, 40)
    gemm.matmul(*quantize_rows(x), *quantize_blocks(weight), out)
    assert out[3].isnan().all() and out.isnan().sum() == 40


# FAULTS B11
COUNTS = [[128, 130, 65], [0, 1, 0, 127], [0, 0, 0, 0], [300], [5, 0, 257, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("spare", [0, 70])
def test_rows_meet_the_weight_of_their_own_expert(counts, spare):
    """Against a loop over experts; rows behind the last expert's are not touched."""
    n, k, rows = 150, 200, sum(counts) + spare
    offsets = torch.tensor(counts).cumsum(0).int()
    a, b = quantize_rows(uneven(rows, k, seed=0)), quantize_blocks(uneven(len(counts), n, k, seed=1))
    out = torch.full((rows, n), -7.0)
    grouped_gemm.grouped_matmul(*a, *b, offsets, out)
    wide, weights = dequantize_rows(*a, torch.float64), dequantize_blocks(*b, torch.float64)
    for piece, x, w in zip(out.split([*counts, spare]), wide.split([*counts, spare]), weights):
        close(piece, x, w)
    assert (out[rows - spare :] == -7).all()


def test_a_program_writes_rows_of_its_own_expert_only(monkeypatch):
    """On a GPU programs run in any order: a row written by two of them would hold either's result."""
    kernel = grouped_gemm.grouped_matmul_kernel
    monkeypatch.setattr(grouped_gemm, "grouped_matmul_kernel", {(3,): kernel[(1,)]})  # the first of three programs
    offsets = torch.tensor([5, 5, 60], dtype=torch.int32)
    a, b = quantize_rows(uneven(60, 128, seed=0)), quantize_blocks(uneven(3, 100, 128, seed=1))
    out = torch.full((60, 100), -7.0)
    grouped_gemm.grouped_matmul(*a, *b, offsets, out)
    assert (out[5:] == -7).all() and (out[:5] != -7).all()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_weight_gradients_of_experts_sum_over_their_own_rows(counts):
    m, n, rows = 140, 129, sum(counts)
    offsets = torch.tensor(counts).cumsum(0).int()
    dy, x = uneven(rows, m, seed=0), uneven(rows, n, seed=1)
    a, b = definitions.columns(dy, offsets), definitions.columns(x, offsets)
    out = uneven(len(counts), m, n, seed=2)
    before = out.clone()
    grouped_gemm.grouped_accumulate(*a, *b, offsets, out)
    for expert, (p, q) in enumerate(zip(dy.split(counts), x.split(counts))):
        if len(p):
            p, q = (dequantize_rows(*quantize_rows(y.t().contiguous()), torch.float64) for y in (p, q))
            close(out[expert], p, q, before[expert].double())
        else:
            assert torch.equal(out[expert], before[expert])


def test_a_gradient_times_a_power_of_two_gives_products_times_exactly_it():
    dy, weight, x = uneven(130, 150, seed=0), uneven(150, 140, seed=1), uneven(130, 140, seed=2)
    results = []
    for factor in (1.0, 2.0**-40):
        dgrad, wgrad = torch.empty(130, 140), torch.zeros(150, 140)
        gemm.matmul(*quantize_rows(dy * factor), *quantize_blocks(weight.t().contiguous()), dgrad)
        gemm.matmul(*definitions.columns(dy * factor), *definitions.columns(x), wgrad, accumulate=True)
        results.append((dgrad / factor, wgrad / factor))
    assert same(*results)
