"""The emulated FP8 products: right values are float64 products of the quantised operands."""

import pytest
import torch

from dstrain.config.errors import InputError
from dstrain.precision.fp8_blocks import dequantize_blocks, quantize_blocks
from dstrain.precision.fp8_gemm import Scaled, backend
from dstrain.precision.fp8_tiles import dequantize_columns, dequantize_rows, quantize_columns, quantize_rows

CPU = torch.device("cpu")
COUNTS = [[128, 130, 65], [0, 1, 0, 127], [0, 0, 0, 0], [3, 300]]


def randn(*shape, seed=0):
    """Rows and columns of different magnitude, so that a wrong scale would be seen."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    size = 2.0 ** (torch.arange(shape[-2]).unsqueeze(-1) % 7) * 10.0 ** (torch.arange(shape[-1]) // 128 % 3)
    return (x * size).bfloat16()


def ends(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def within_one_ulp(mine, exact):
    """BF16 against float64: at most the next BF16 number, up to what cancels in the sum."""
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.double(), exact, rtol=2**-8, atol=1e-5 * exact.abs().max().item() if exact.numel() else 0)


@pytest.fixture(params=[True, False], ids=["power_of_two", "fp32"])
def emulated(request):
    return backend("emulated", CPU, request.param)


@pytest.mark.parametrize(("m", "n", "k"), [(133, 192, 300), (1, 130, 128), (64, 576, 20), (5, 1, 1)])
def test_fprop_and_dgrad_operands_give_float64s_product_within_one_bf16_ulp(emulated, m, n, k):
    x, weight, grad = randn(m, k), randn(n, k, seed=1), randn(m, n, seed=2)
    a, blocks = quantize_rows(x, emulated.power_of_two), quantize_blocks(weight, emulated.power_of_two)
    values, rows = dequantize_blocks(*blocks, torch.float32), dequantize_rows(*a, torch.float32)
    forward, backward = emulated.quantize_weight(weight)
    exact = rows.double() @ values.double().t()
    within_one_ulp(emulated.matmul(Scaled(*a), Scaled(*blocks), torch.bfloat16), exact)
    within_one_ulp(emulated.matmul(emulated.quantize_rows(x), forward, torch.bfloat16), exact)
    torch.testing.assert_close(emulated.matmul(Scaled(*a), forward, torch.float32).double(), exact, rtol=1e-5, atol=1e-5 * exact.abs().max().item())
    grad_rows = dequantize_rows(*quantize_rows(grad, emulated.power_of_two), torch.float32)
    within_one_ulp(emulated.matmul(emulated.quantize_rows(grad), backward, torch.bfloat16), grad_rows.double() @ values.double())
    assert torch.equal(emulated.dequantize_weight(forward, torch.float32), values)


@pytest.mark.parametrize(("m", "n", "k"), [(192, 130, 300), (1, 1, 1), (64, 256, 128)])
def test_wgrad_adds_float64s_product_to_1e5(emulated, m, n, k):
    dy, x = randn(k, m), randn(k, n, seed=1)
    a, b = (quantize_columns(t, None, emulated.power_of_two) for t in (dy, x))
    exact = dequantize_columns(*a, None, torch.float32).double() @ dequantize_columns(*b, None, torch.float32).double().t()
    for left, right in ((Scaled(*a), Scaled(*b)), (emulated.quantize_columns(dy, None), emulated.quantize_columns(x, None))):
        start = torch.randn(m, n, generator=torch.Generator().manual_seed(5)) * exact.abs().max().float()
        out = start.clone()
        emulated.accumulate(left, right, out)
        assert (out.double() - (start.double() + exact)).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products_equal_a_loop_over_experts(emulated, counts):
    """FAULTS B11."""
    rows, experts = sum(counts), len(counts)
    x, dy, weight = randn(rows, 144), randn(rows, 160, seed=1), randn(experts, 160, 144, seed=2)
    offsets, p = ends(counts), emulated.power_of_two
    forward, backward = emulated.quantize_weight(weight)
    y = emulated.grouped_matmul(emulated.quantize_rows(x), forward, offsets, torch.bfloat16)
    dx = emulated.grouped_matmul(emulated.quantize_rows(dy), backward, offsets, torch.bfloat16)
    out = torch.zeros(experts, 160, 144)
    emulated.grouped_accumulate(emulated.quantize_columns(dy, offsets), emulated.quantize_columns(x, offsets), offsets, out)
    assert y.shape == dy.shape and dx.shape == x.shape
    start = 0
    for expert, count in enumerate(counts):
        own, start = slice(start, start + count), start + count
        values = dequantize_blocks(*quantize_blocks(weight[expert], p), torch.float32).double()
        within_one_ulp(y[own], dequantize_rows(*quantize_rows(x[own], p), torch.float32).double() @ values.t())
        within_one_ulp(dx[own], dequantize_rows(*quantize_rows(dy[own], p), torch.float32).double() @ values)
        left, right = (dequantize_columns(*quantize_columns(t[own], None, p), None, torch.float32).double() for t in (dy, x))
        exact = left @ right.t()
        assert (out[expert].double() - exact).norm() <= 1e-5 * exact.norm()


def test_the_faster_cpu_product_is_left_as_it_was():
    before = torch.backends.mkldnn.matmul.fp32_precision
    emulated = backend("emulated", CPU)
    a = emulated.quantize_columns(randn(64, 64), None)
    emulated.accumulate(a, a, torch.zeros(64, 64))
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((x @ x).double(), x.double() @ x.double(), rtol=1e-5, atol=1e-5)


def test_auto_is_emulated_without_a_gpu_and_an_unknown_backend_is_refused():
    assert backend("auto", CPU).name == "emulated"
    with pytest.raises(InputError, match="precision.backend='cublas': valid are auto, emulated"):
        backend("cublas", CPU)
