"""FP8 Linear and grouped Linear: against float64 of the unquantised, within what rounding to E4M3 explains."""

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled_kernels

from dstrain.precision import e5m6, fp8_blocks, fp8_tiles
from dstrain.precision.fp8_gemm import backend
from dstrain.precision.fp8_linear import fp8_linear, fp8_normed_linear, kept_weight, weights_were_written
from dstrain.precision.linear import GroupedLinear, Linear, grouped_mlp, mlp, normed_linears
from dstrain.precision.main_grad import WeightGradQueue, attach_main_grads, deferred
from dstrain.precision.pointwise import RMSNorm

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


@pytest.mark.parametrize("again", [False, True])
def test_a_norm_and_two_weights_are_as_if_each_had_its_own_input(fp8, again):
    """Values are those of the norm by itself and two separate Linears; the gradients of its output are summed."""
    layers = [make(Linear(140, size, torch.bfloat16, fp8)) for size in (96, 130)]
    norm = RMSNorm(140, 1e-6, torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * randn(140, seed=5).float())
    x, dys = randn(7, 2, 140, scale=3), [randn(7, 2, 96, seed=2), randn(7, 2, 130, seed=3)]
    together = x.clone().requires_grad_()
    outputs = normed_linears(together, norm, *layers, again=again)
    torch.autograd.backward(outputs, dys)
    weight_grads, norm_grad = [layer.weight.main_grad.clone() for layer in layers], norm.weight.grad
    grad, norm.weight.grad, apart = None, None, x.clone().requires_grad_()
    normed = norm(apart)
    for layer, output, dy, weight_grad in zip(layers, outputs, dys, weight_grads):
        alone = normed.detach().requires_grad_()
        layer.weight.main_grad.zero_()
        out = layer(alone)
        out.backward(dy)
        assert torch.equal(out, output)
        if not again:  # what `again` changes is the next test's
            assert torch.equal(layer.weight.main_grad, weight_grad)
        grad = alone.grad if grad is None else grad + alone.grad
    normed.backward(grad)
    assert torch.equal(together.grad, apart.grad) and torch.equal(norm_grad, norm.weight.grad) and norm_grad.any()
    with torch.no_grad():
        assert all(map(torch.equal, normed_linears(x, norm, *layers, again=again), outputs))


def test_what_is_kept_of_the_input_decides_what_wgrad_takes(fp8):
    """Tiles: requantised; a norm computed again: quantised once, from BF16; E5M6: re-expressed. Each written out here."""
    weight, x, dy = torch.nn.Parameter(randn(64, 140, scale=0.05)), randn(133, 140), randn(133, 64, seed=2)
    p, norm = fp8.power_of_two, RMSNorm(140, 1e-6, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    normed = norm(x).detach()
    linear = lambda x, e5m6=False: fp8_linear(x, weight, fp8, e5m6=e5m6)
    columns = {
        "tiles": (linear, fp8_tiles.requantize_columns(*fp8_tiles.quantize_rows(x, p), None, p)),
        "e5m6": (lambda x: linear(x, True), e5m6.e5m6_to_columns(*e5m6.quantize_e5m6(x), 140, p)),
        "norm": (
            lambda x: fp8_normed_linear(x, norm, [weight], fp8, again=False)[0],
            fp8_tiles.requantize_columns(*fp8_tiles.quantize_rows(normed, p), None, p),
        ),
        "norm again": (
            lambda x: fp8_normed_linear(x, norm, [weight], fp8, again=True)[0],
            fp8_tiles.quantize_columns(normed, None, p),
        ),
    }
    grad = fp8_tiles.dequantize_columns(*fp8_tiles.quantize_columns(dy, None, p), None, torch.float32)
    seen = []
    for function, operand in columns.values():
        weight.main_grad = torch.zeros(64, 140)
        function(x.clone().requires_grad_()).backward(dy)
        exact = grad.double() @ fp8_tiles.dequantize_columns(*operand, None, torch.float32).double().t()
        assert (weight.main_grad.double() - exact).norm() <= 1e-5 * exact.norm()
        seen.append(weight.main_grad)
    assert not torch.equal(seen[0], seen[1]) and (p or not torch.equal(seen[2], seen[3]))


def test_put_off_weight_gradients_arrive_when_their_chunk_is_popped(fp8):
    gate, up = (make(GroupedLinear(2, 130, 64, torch.bfloat16, fp8)) for _ in range(2))
    down = make(GroupedLinear(2, 64, 130, torch.bfloat16, fp8))
    layers = gate, up, down
    offsets, x, dy = torch.tensor([3, 9], dtype=torch.int32), randn(9, 130), randn(9, 130, seed=2)
    expected = []
    for queue in (None, WeightGradQueue()):
        for layer in layers:
            layer.weight.main_grad.zero_()
        output = grouped_mlp(x.clone().requires_grad_(), torch.ones(9), offsets, *layers)
        if queue is None:
            output.backward(dy)
            expected = [layer.weight.main_grad.clone() for layer in layers]
            continue
        with deferred(queue):
            output.backward(dy)
        assert not any(layer.weight.main_grad.any() for layer in layers)
        queue.pop()
    assert all(grad.any() and torch.equal(layer.weight.main_grad, grad) for layer, grad in zip(layers, expected))


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_backward_and_its_second_output_come_from_the_quantised_inputs(fp8, weighted):
    gate, up, grad, p = randn(9, 140), randn(9, 140, seed=2), randn(9, 140, seed=4), fp8.power_of_two
    weight = torch.rand(9, generator=torch.Generator().manual_seed(3)) if weighted else None
    out, inputs = fp8.swiglu(gate, up, weight, keep=True)
    exact = F.silu(gate.double()) * up.double() * (weight.double().unsqueeze(-1) if weighted else 1)
    close(fp8._rows(out, torch.float32), quantised(exact.bfloat16(), p))  # forward sees the unquantised
    wide = [quantised(t, p).bfloat16().double().requires_grad_() for t in (gate, up)]
    row = weight.double().requires_grad_() if weighted else None
    kept = F.silu(wide[0]) * wide[1] * (row.unsqueeze(-1) if weighted else 1)
    expected = torch.autograd.grad(kept, [*wide, *([row] if weighted else [])], grad.double())
    again, *grads, grad_weight = fp8.swiglu_backward(grad, *inputs, weight, None)
    close(fp8._columns(again, None, torch.float32), quantised(kept.detach().bfloat16(), p, "columns"))
    for (rows, columns), theirs in zip(grads, expected):
        close(fp8._rows(rows, torch.float32), quantised(theirs.bfloat16(), p))
        close(fp8._columns(columns, None, torch.float32), quantised(theirs.bfloat16(), p, "columns"))
    assert (grad_weight is None) != weighted
    if weighted:
        torch.testing.assert_close(grad_weight.double(), expected[2], rtol=2**-7, atol=1e-5)


def quantised(x, power_of_two, way="rows"):
    """x [rows, cols] -> E4M3 and back in float64; of columns [cols, rows]."""
    if way == "rows":
        return fp8_tiles.dequantize_rows(*fp8_tiles.quantize_rows(x, power_of_two), torch.float32).double()
    columns = fp8_tiles.quantize_columns(x, None, power_of_two)
    return fp8_tiles.dequantize_columns(*columns, None, torch.float32).double()


def close(mine, theirs):
    """Equal but for what the last bit of BF16 moves: codes by a step, and with FP32 scales a whole tile by 2^-8.

    E4M3 itself is 2.6 % of the norm away."""
    assert mine.shape == theirs.shape
    assert (mine.double() - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.parametrize("kind", ["dense", "again", "experts"])
def test_an_mlp_equals_float64_products_of_the_quantised_operands(fp8, kind):
    """Every product of forward and backward computed in float64 from operands quantised by the definitions; what lies
    between is rounded to BF16 where the compute type is. Leaving one quantisation out is visibly farther away."""
    p, experts, rows = fp8.power_of_two, (2 if kind == "experts" else 1), 140
    ends = [50, rows] if experts == 2 else [rows]
    make_layer = lambda n, m: make(GroupedLinear(2, n, m, torch.bfloat16, fp8) if experts == 2 else Linear(n, m, torch.bfloat16, fp8))
    layers = make_layer(200, 130), make_layer(200, 130), make_layer(130, 200)
    with torch.no_grad():
        layers[1].weight.mul_(3).add_(0.01)
    x, dy = randn(rows, 200, scale=3).requires_grad_(), randn(rows, 200, seed=2)
    factor = torch.rand(rows, generator=torch.Generator().manual_seed(3)).requires_grad_()
    if kind == "experts":
        out = grouped_mlp(x, factor, torch.tensor(ends, dtype=torch.int32), *layers)
    else:
        out = mlp(x, *layers, again=(lambda: x.detach()) if kind == "again" else None)
    out.backward(dy)

    def reference(quantise_swiglu=True):
        results, begin = [[], [], []], 0
        grads = [torch.zeros(layer.weight.shape, dtype=torch.float64).view(experts, *layer.weight.shape[-2:]) for layer in layers]
        for expert, end in enumerate(ends):
            part, grad = x.detach()[begin:end], dy[begin:end]
            row = factor.detach()[begin:end].double().unsqueeze(-1) if kind == "experts" else 1.0
            wg, wu, wd = (
                fp8_blocks.dequantize_blocks(
                    *fp8_blocks.quantize_blocks(layer.weight.detach().view(experts, *layer.weight.shape[-2:])[expert], p), torch.float32
                ).double() for layer in layers
            )
            g, u = ((quantised(part, p) @ w.t()).bfloat16() for w in (wg, wu))
            a = (F.silu(g.double()) * u.double() * row).bfloat16()
            y = (quantised(a, p) if quantise_swiglu else a.double()) @ wd.t()
            kept = [quantised(t, p).bfloat16().double().requires_grad_() for t in (g, u)]
            silu = F.silu(kept[0]) * kept[1]
            da = (quantised(grad, p) @ wd).bfloat16().double()
            dg, du = (t.bfloat16() for t in torch.autograd.grad(silu, kept, da * row))
            dx = ((quantised(dg, p) @ wg).bfloat16() + (quantised(du, p) @ wu).bfloat16()).double()
            x_columns = quantised(part if kind == "again" else quantised(part, p).float(), p, "columns")
            grads[2][expert] = quantised(grad, p, "columns") @ quantised((silu.detach() * row).bfloat16(), p, "columns").t()
            grads[0][expert], grads[1][expert] = (quantised(t, p, "columns") @ x_columns.t() for t in (dg, du))
            for list_, value in zip(results, (y, dx, (silu.detach() * da).sum(-1))):
                list_.append(value)
            begin = end
        return [torch.cat(list_) for list_ in results], grads

    (y, dx, dfactor), grads = reference()
    mine = [out.detach(), x.grad, *(layer.weight.main_grad.view_as(grad) for layer, grad in zip(layers, grads))]
    expected = [y, dx, *grads]
    if kind == "experts":
        mine, expected = [*mine, factor.grad], [*expected, dfactor]
    for value, right in zip(mine, expected, strict=True):
        assert (value.double() - right).norm() <= (4e-3 if p else 1.5e-2) * right.norm()  # see `close`
    unquantised = reference(quantise_swiglu=False)[0][0]
    assert (out.detach().double() - unquantised).norm() > 1e-2 * unquantised.norm()


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
