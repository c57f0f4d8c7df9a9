"""Split backward: what Linear layers write into main_grad, at once or from a queue, equals autograd's gradients."""

import pytest
import torch
import torch.nn.functional as F
from helpers import compiled_kernels

from dstrain.precision import pointwise
from dstrain.precision.linear import Embedding, GroupedLinear, Linear
from dstrain.precision.main_grad import WeightGradQueue, attach_main_grads, deferred
from dstrain.precision.pointwise import RMSNorm, swiglu


def make(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    attach_main_grads(module, torch.float64)
    return module


def randn(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_linear_equals_autograd_and_accumulates_over_calls():
    layer, x, grad = make(Linear(5, 3, torch.float64)), randn(2, 4, 5), randn(2, 4, 3, seed=2).detach()
    weight = layer.weight.detach().clone().requires_grad_()
    expected = torch.autograd.grad(F.linear(x, weight), (x, weight), grad)
    for times in (1, 2):
        torch.testing.assert_close(torch.autograd.grad(layer(x), x, grad)[0], expected[0])
        torch.testing.assert_close(layer.weight.main_grad, times * expected[1])
    assert layer.weight.grad is None


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [0, 7, 0], [130, 1, 65], [0, 0, 9]])
@pytest.mark.parametrize("size", [5, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grouped_linear_equals_a_loop_over_experts(counts, size, dtype):
    """FAULTS B12, B11: an expert without tokens has zero gradients, not None; no row sees another expert's weight."""
    layer = make(GroupedLinear(3, size, 2 * size, dtype))
    x, grad = randn(sum(counts), size).detach().to(dtype).requires_grad_(), randn(sum(counts), 2 * size, seed=2).detach().to(dtype)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    weight = layer.weight.detach().clone().requires_grad_()
    parts = torch.cat([rows @ weight[expert].t() for expert, rows in enumerate(x.split(counts))])
    expected = torch.autograd.grad(parts, (x, weight), grad)
    out = layer(x, offsets)
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, parts, **close)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], expected[0], **close)
    torch.testing.assert_close(layer.weight.main_grad, expected[1].double(), **close)


def test_embedding_adds_the_gradients_of_repeated_ids():
    layer, ids = make(Embedding(6, 3, torch.float64)), torch.tensor([[1, 4, 1], [5, 1, 4]])
    weight = layer.weight.detach().clone().requires_grad_()
    grad = randn(2, 3, 3).detach()
    layer(ids).backward(grad)
    torch.testing.assert_close(layer.weight.main_grad, torch.autograd.grad(F.embedding(ids, weight), weight, grad)[0])


def test_put_off_weight_gradients_arrive_when_their_chunk_is_popped():
    """FAULTS A14: nothing before pop, the same value after it, oldest chunk first, and outside a queue at once."""
    layer, x = make(Linear(5, 3, torch.float64)), randn(4, 5)
    queue = WeightGradQueue()
    for seed in (1, 2):
        with deferred(queue):
            torch.autograd.grad(layer(x), x, randn(4, 3, seed=seed).detach())
    assert len(queue) == 2 and not layer.weight.main_grad.any()
    first, second = (randn(4, 3, seed=seed).detach().t() @ x.detach() for seed in (1, 2))
    queue.pop()
    torch.testing.assert_close(layer.weight.main_grad, first)
    queue.pop()
    torch.testing.assert_close(layer.weight.main_grad, first + second)
    assert len(queue) == 0
    torch.autograd.grad(layer(x), x, randn(4, 3).detach())
    torch.testing.assert_close(layer.weight.main_grad, 2 * first + second)


def test_bf16_gradients_are_summed_in_fp32():
    """A thousand gradients of 1.0: BF16 would stop at 256."""
    layer = Linear(1, 1, torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    attach_main_grads(layer, torch.float32)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(1000):
        torch.autograd.grad(layer(x), x, torch.ones(1, 1, dtype=torch.bfloat16))
    assert layer.weight.main_grad.item() == 1000


def test_rms_norm_equals_its_definition():
    norm, x, grad = make(RMSNorm(7, 1e-6, torch.float64)), randn(2, 3, 7), randn(2, 3, 7, seed=2).detach()
    weight = norm.weight.detach().clone().requires_grad_()
    definition = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * weight
    expected = torch.autograd.grad(definition, (x, weight), grad)
    out = norm(x)
    torch.testing.assert_close(out, definition)
    out.backward(grad)
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(norm.weight.main_grad, expected[1])
    assert norm.weight.grad is None


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_equals_its_definition(weighted):
    gate, up, weight = randn(5, 4), randn(5, 4, seed=2), randn(5, seed=3) if weighted else None
    inputs = [x for x in (gate, up, weight) if x is not None]
    definition = F.silu(gate) * up * (weight.unsqueeze(-1) if weighted else 1)
    grad = randn(5, 4, seed=4).detach()
    out = swiglu(gate, up, weight)
    torch.testing.assert_close(out, definition)
    for mine, theirs in zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(definition, inputs, grad)):
        torch.testing.assert_close(mine, theirs)


def test_norms_and_swiglu_compute_in_fp32_and_return_the_compute_type():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    norm = RMSNorm(256, 1e-6, torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    rounded = x.to(torch.bfloat16)
    exact = F.rms_norm(rounded.double(), (256,), eps=1e-6)
    assert norm.weight.dtype == torch.float32
    torch.testing.assert_close(norm(rounded), exact.to(torch.bfloat16), rtol=0, atol=0)
    gate, up = rounded, rounded.flip(0)
    torch.testing.assert_close(swiglu(gate, up), (F.silu(gate.double()) * up.double()).to(torch.bfloat16), rtol=2**-7, atol=1e-6)


@pytest.fixture
def compiled():
    with compiled_kernels():
        yield


@pytest.mark.long
def test_compiled_kernels_equal_the_eager_ones(compiled):
    """Any number of rows, in BF16; the right values are those of the functions themselves."""
    tolerance = 2**-7
    for rows in (1, 7, 130):
        x, y, grad = (randn(rows, 48, seed=s).detach().bfloat16() for s in (1, 2, 3))
        weight, row_weight = randn(48, seed=4).detach().float(), randn(rows, seed=5).detach().float()
        _, inverse = pointwise.rms_norm_forward.__wrapped__(x, weight, 1e-6)
        angles = randn(rows, 24, seed=6).detach().float()
        for name, args in {
            "rms_norm_forward": (x, weight, 1e-6),
            "rms_norm_backward": (grad, x, weight, inverse),
            "swiglu_forward": (x, y),
            "swiglu_backward": (grad, x, y),
            "weighted_swiglu_forward": (x, y, row_weight),
            "weighted_swiglu_backward": (grad, x, y, row_weight),
            "rotate_forward": (x, angles.cos(), angles.sin()),
        }.items():
            call = getattr(pointwise, name)
            mine, expected = call(*args), call.__wrapped__(*args)
            torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
