"""FP8 Linear and grouped Linear: against float64 of the unquantised, within what rounding to E4M3 explains."""

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled_kernels

from dstrain.precision import e5m6, fp8_blocks, fp8_tiles
from dstrain.precision.fp8_gemm import backend
from dstrain.precision.fp8_linear import fp8_linear, kept_weight, weights_were_written
from dstrain.precision.linear import GroupedLinear, Linear, grouped_linears, linears, swiglu_again
from dstrain.precision.main_grad import WeightGradQueue, attach_main_grads, deferred

CPU = torch.device("cpu")
COUNTS = [[128, 130, 65], [0, 1, 0, 127], [0, 0, 0, 0]]


@pytest.fixture(params=[True, False], ids=["power_of_two", "fp32"])
def fp8(request):
    return backend("emulated", CPU, request.param)


def make(module):
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.05)
    attach_main_grads(module, torch.float32)
    return module


def randn(*shape, seed=1, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def error_explained(mine, a, b, power_of_two):
    """|mine - a b| for operands of which each element is off by at most 2^-4 of itself or of its tile's step.

    Errors of independent sign add like sqrt(K); 5 standard deviations over all elements. A uniform error of at most
    2^-4 relative has a deviation of 2^-4 / sqrt(3), of either operand; BF16 output adds 2^-9.
    """
    exact = a.double() @ b.double()
    deviation = 2**-4 / 3**0.5 * 2**0.5 * ((a.double() ** 2) @ (b.double() ** 2)).sqrt()
    floor = 2.0**-10 * a.abs().max().double() * b.abs().max().double()
    assert ((mine.double() - exact).abs() <= 5 * deviation + 2**-8 * exact.abs() + floor).all()
    if exact.numel():  # the typical error is a fifth of that bound, and it is there
        assert 0 < (mine.double() - exact).norm() <= 0.05 * ((a.double() ** 2) @ (b.double() ** 2)).sum().sqrt()


def test_linear_is_within_the_error_of_block_quantisation(fp8):
    layer, x, dy = make(Linear(300, 192, torch.bfloat16, fp8)), randn(2, 70, 300).requires_grad_(), randn(2, 70, 192, seed=2)
    y = layer(x)
    y.backward(dy)
    rows, grads, weight = x.detach().flatten(0, 1), dy.flatten(0, 1), layer.weight.detach()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and layer.weight.grad is None
    error_explained(y.detach().flatten(0, 1), rows, weight.t(), fp8.power_of_two)
    error_explained(x.grad.flatten(0, 1), grads, weight, fp8.power_of_two)
    error_explained(layer.weight.main_grad, grads.t(), rows, fp8.power_of_two)


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear_equals_a_linear_per_expert(fp8, counts):
    """FAULTS B11, B12: bit by bit; an expert without rows has a gradient of zeros."""
    experts, offsets = len(counts), torch.tensor(counts).cumsum(0).to(torch.int32)
    layer = make(GroupedLinear(experts, 144, 160, torch.bfloat16, fp8))
    x, dy = randn(sum(counts), 144).requires_grad_(), randn(sum(counts), 160, seed=2)
    y = layer(x, offsets)
    y.backward(dy)
    start = 0
    for expert, count in enumerate(counts):
        own, start = slice(start, start + count), start + count
        single = Linear(144, 160, torch.bfloat16, fp8)
        with torch.no_grad():
            single.weight.copy_(layer.weight[expert])
        attach_main_grads(single, torch.float32)
        rows = x.detach()[own].requires_grad_()
        out = single(rows)
        out.backward(dy[own])
        torch.testing.assert_close(y[own], out, rtol=2**-8, atol=2**-10)
        torch.testing.assert_close(x.grad[own], rows.grad, rtol=2**-8, atol=2**-10)
        torch.testing.assert_close(layer.weight.main_grad[expert], single.weight.main_grad, rtol=1e-5, atol=1e-4)
        assert count or not layer.weight.main_grad[expert].any()


def test_scaling_dy_by_2_to_the_minus_40_scales_both_gradients_by_exactly_that(fp8):
    offsets = torch.tensor([100, 100, 133], dtype=torch.int32)
    layer, grouped = make(Linear(200, 144, torch.bfloat16, fp8)), make(GroupedLinear(3, 200, 144, torch.bfloat16, fp8))
    x, dy = randn(133, 200), randn(133, 144, seed=2, scale=1e-6)
    for module, arguments in ((layer, ()), (grouped, (offsets,))):
        results = []
        for factor in (1.0, 2.0**-40):
            module.weight.main_grad.zero_()
            leaf = x.clone().requires_grad_()
            module(leaf, *arguments).backward(dy * factor)
            results.append((leaf.grad.double() / factor, module.weight.main_grad.double() / factor))
        assert results[0][0].any() and results[0][1].any()
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_zero_rows_stay_exact_zeros(fp8):
    """FAULTS B07."""
    layer, x, dy = make(Linear(130, 130, torch.bfloat16, fp8)), randn(5, 130), randn(5, 130, seed=2)
    with torch.no_grad():
        layer.weight[:, :128] = 0
        x[2], dy[3] = 0, 0
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert not y[2].any() and not x.grad[3].any() and y.isfinite().all() and layer.weight.main_grad.isfinite().all()
    assert not x.grad[:, :128].any()


@pytest.mark.parametrize("where", ["x", "dy", "weight"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_number_is_seen_in_every_product_that_it_enters(fp8, where, bad):
    layer, x, dy = make(Linear(130, 140, torch.bfloat16, fp8)), randn(5, 130), randn(5, 140, seed=2)
    with torch.no_grad():
        {"x": x, "dy": dy, "weight": layer.weight}[where][1, 3] = bad
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    for result, factors in ((y, ("x", "weight")), (x.grad, ("dy", "weight")), (layer.weight.main_grad, ("x", "dy"))):
        assert result.isnan().any() == (where in factors)


def test_two_weights_share_one_input_as_if_each_had_its_own(fp8):
    """The input's gradient is the sum; values are those of two separate Linears."""
    layers = [make(Linear(140, size, torch.bfloat16, fp8)) for size in (96, 130)]
    x, dys = randn(7, 140), [randn(7, 96, seed=2), randn(7, 130, seed=3)]
    together = x.clone().requires_grad_()
    outputs = linears(together, *layers)
    torch.autograd.backward(outputs, dys)
    weight_grads = [layer.weight.main_grad.clone() for layer in layers]
    grad = None
    for layer, output, dy, weight_grad in zip(layers, outputs, dys, weight_grads):
        alone = x.clone().requires_grad_()
        layer.weight.main_grad.zero_()
        out = layer(alone)
        out.backward(dy)
        assert torch.equal(out, output) and torch.equal(layer.weight.main_grad, weight_grad)
        grad = alone.grad if grad is None else grad + alone.grad
    assert torch.equal(together.grad, grad)


def test_what_is_kept_of_the_input_decides_what_wgrad_takes(fp8):
    """Tiles: requantised; computed again: quantised once, from BF16; E5M6: re-expressed. Each written out here."""
    weight, x, dy = torch.nn.Parameter(randn(64, 140, scale=0.05)), randn(133, 140), randn(133, 64, seed=2)
    p = fp8.power_of_two
    columns = {
        "tiles": fp8_tiles.requantize_columns(*fp8_tiles.quantize_rows(x, p), None, p),
        "again": fp8_tiles.quantize_columns(x, None, p),
        "e5m6": e5m6.e5m6_to_columns(*e5m6.quantize_e5m6(x), 140, p),
    }
    grad = fp8_tiles.dequantize_columns(*fp8_tiles.quantize_columns(dy, None, p), None, torch.float32)
    seen = []
    for kind, operand in columns.items():
        weight.main_grad = torch.zeros(64, 140)
        (y,) = fp8_linear(x.clone().requires_grad_(), [weight], fp8, again=(lambda: x) if kind == "again" else None, e5m6=kind == "e5m6")
        y.backward(dy)
        exact = grad.double() @ fp8_tiles.dequantize_columns(*operand, None, torch.float32).double().t()
        assert (weight.main_grad.double() - exact).norm() <= 1e-5 * exact.norm()
        seen.append(weight.main_grad)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_put_off_weight_gradients_arrive_when_their_chunk_is_popped(fp8):
    layers = [make(GroupedLinear(2, 130, 64, torch.bfloat16, fp8)) for _ in range(2)]
    offsets, x, dy = torch.tensor([3, 9], dtype=torch.int32), randn(9, 130), randn(9, 64, seed=2)
    expected = []
    for queue in (None, WeightGradQueue()):
        for layer in layers:
            layer.weight.main_grad.zero_()
        outputs = grouped_linears(x.clone().requires_grad_(), offsets, *layers)
        if queue is None:
            torch.autograd.backward(outputs, [dy, dy])
            expected = [layer.weight.main_grad.clone() for layer in layers]
            continue
        with deferred(queue):
            torch.autograd.backward(outputs, [dy, dy])
        assert not any(layer.weight.main_grad.any() for layer in layers)
        queue.pop()
    assert all(torch.equal(layer.weight.main_grad, grad) for layer, grad in zip(layers, expected))


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_backward_and_its_second_output_come_from_the_quantised_inputs(fp8, weighted):
    gate, up = randn(9, 140), randn(9, 140, seed=2)
    weight = torch.rand(9, generator=torch.Generator().manual_seed(3)) if weighted else None
    grad = randn(9, 140, seed=4)
    inputs = [t.clone().requires_grad_() for t in (gate, up, weight) if t is not None]
    out, again = swiglu_again(*inputs[:2], inputs[2] if weighted else None, fp8)
    out.backward(grad)
    factor = weight.double().unsqueeze(-1) if weighted else 1
    exact = F.silu(gate.double()) * up.double() * factor
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)  # forward sees the unquantised
    p = fp8.power_of_two
    wide = [fp8_tiles.dequantize_rows(*fp8_tiles.quantize_rows(t, p), torch.bfloat16).double().requires_grad_() for t in (gate, up)]
    row = weight.double().requires_grad_() if weighted else None
    kept = F.silu(wide[0]) * wide[1] * (row.unsqueeze(-1) if weighted else 1)
    torch.testing.assert_close(again().double(), kept, rtol=2**-8, atol=1e-6)
    expected = torch.autograd.grad(kept, [*wide, *([row] if weighted else [])], grad.double())
    for mine, theirs in zip(inputs, expected):
        torch.testing.assert_close(mine.grad.double(), theirs, rtol=2**-7, atol=1e-5)


def test_a_weight_is_quantised_once_until_it_changes_whoever_changes_it(fp8):
    layer = make(Linear(130, 64, torch.bfloat16, fp8))
    first = kept_weight(layer.weight, fp8)
    assert kept_weight(layer.weight, fp8) is first
    changes = [
        lambda: layer.weight.detach().view(-1)[:8].copy_(torch.ones(8)),
        lambda: layer.load_state_dict({"weight": randn(64, 130, seed=5)}),
        lambda: (layer.weight.data.mul_(2), weights_were_written()),
        lambda: setattr(layer.weight, "data", randn(64, 130, seed=6)),
    ]
    for change in changes:
        before = kept_weight(layer.weight, fp8)
        with torch.no_grad():
            change()
        after = kept_weight(layer.weight, fp8)
        assert after is not before
        fresh = fp8.dequantize_weight(fp8.quantize_weight(layer.weight.detach())[0], torch.float32)
        assert torch.equal(fp8.dequantize_weight(after[0], torch.float32), fresh)
        assert torch.equal(layer.dense_weight().float(), fresh.bfloat16().float())


@pytest.mark.long
def test_compiled_quantisers_equal_the_definitions_bit_by_bit():
    x = randn(133, 320) * torch.logspace(-20, 20, 133).unsqueeze(-1).bfloat16()
    x[3, 7], x[5, 300], x[70] = torch.nan, -torch.inf, 0
    offsets = torch.tensor([0, 50, 51, 133], dtype=torch.int32)

    def results():
        for p in (True, False):
            for cols in (320, 256):
                part = x[:, :cols].contiguous()
                yield from (*fp8_tiles.quantize_rows(part, p), *fp8_tiles.quantize_columns(part, offsets, p))
                yield from (*fp8_tiles.quantize_columns(part, None, p), *fp8_blocks.quantize_blocks(part, p))
                yield fp8_tiles.dequantize_rows(*fp8_tiles.quantize_rows(part, p), torch.bfloat16)
            yield from (*e5m6.quantize_e5m6(x), *e5m6.e5m6_to_columns(*e5m6.quantize_e5m6(x), 320, p))

    expected = list(results())
    with compiled_kernels():
        for mine, theirs in zip(results(), expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
