"""The local dispatcher: rows in expert order, sums per token, and mirrors that are transposes (FAULTS B14, B11)."""

import pytest
import torch
from oracle import tiny_config
from small_models import build, run, sample

from dstrain.parallel.dispatch import LocalDispatcher

IDS = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
WEIGHTS = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.25], [0.1, 0.9]], dtype=torch.float64)


def test_rows_are_sorted_by_expert_then_token_with_their_weights():
    route = LocalDispatcher().route(IDS, experts=4)
    x = torch.arange(4.0, dtype=torch.float64).unsqueeze(-1)
    rows, weights = route.dispatch(x, WEIGHTS).wait()
    assert rows.flatten().tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert weights.tolist() == [0.3, 0.6, 0.1, 0.4, 0.25, 0.7, 0.5, 0.9]
    assert route.offsets.tolist() == [3, 5, 8, 8]


def test_an_expert_that_has_rows_is_filled_up_with_rows_of_weight_0():
    route = LocalDispatcher(alignment=4).route(IDS, experts=4)
    x = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(-1)
    rows, weights = route.dispatch(x, WEIGHTS).wait()
    assert route.offsets.tolist() == [4, 8, 12, 12]
    assert weights.tolist() == [0.3, 0.6, 0.1, 0, 0.4, 0.25, 0, 0, 0.7, 0.5, 0.9, 0]
    assert rows[weights > 0].flatten().tolist() == [1, 2, 4, 2, 3, 1, 3, 4]


def test_filling_up_changes_no_loss_no_load_and_no_gradient():
    """The whole model in float64: the right values are those without filling rows."""
    config = tiny_config()
    tokens, documents = sample(config)
    results = []
    for alignment in (1, 32):
        model, _ = build(config, torch.float64)
        sums, _ = run(model, config, tokens, documents, False, dispatcher=LocalDispatcher(alignment))
        results.append((sums.depths, {n: p.main_grad for n, p in model.named_parameters()}, [r.load for r in model.routers]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("alignment", [1, 4])
def test_a_choice_of_no_expert_adds_nothing(alignment):
    """FAULTS B14. Experts are linear here; the right values are those of the picks that are left."""
    ids = torch.tensor([[2, -1], [-1, -1], [2, 2], [0, 1]])
    route = LocalDispatcher(alignment).route(ids, experts=3)
    x = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(-1)
    rows, weights = route.dispatch(x, WEIGHTS).wait()
    assert weights[weights > 0].tolist() == [0.1, 0.9, 0.7, 0.5, 0.25]
    assert rows[weights > 0].flatten().tolist() == [4, 4, 1, 3, 3]
    assert len(rows) == route.offsets[-1] == (8 if alignment == 1 else 16)  # 1, 1 and 3 + 3 that only fill up
    right = torch.tensor([0.7, 0, 3 * 0.75, 4], dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(route.combine(rows * weights.unsqueeze(-1)).wait(), right)
    grad_x, grad_weights = route.dispatch_backward(weights.unsqueeze(-1), torch.ones_like(weights)).wait()
    torch.testing.assert_close(grad_x.flatten(), torch.tensor([0.7, 0, 0.75, 1], dtype=torch.float64))
    assert grad_weights.tolist() == [[1, 0], [0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("alignment", [1, 4])
def test_identity_experts_give_each_token_times_the_sum_of_its_weights(alignment):
    route = LocalDispatcher(alignment).route(IDS, experts=4)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, weights = route.dispatch(x, WEIGHTS).wait()
    torch.testing.assert_close(route.combine(rows * weights.unsqueeze(-1)).wait(), x * WEIGHTS.sum(1, keepdim=True))


@pytest.mark.parametrize("alignment", [1, 4])
def test_each_backward_is_the_transpose_of_its_forward(alignment):
    """Gradients of filling rows are zero on the way back to the tokens, as the experts make them."""
    route = LocalDispatcher(alignment).route(IDS, experts=4)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = WEIGHTS.clone().requires_grad_()
    rows, row_weights = route.dispatch(x, weights).wait()
    real = (row_weights > 0).detach()
    grad_rows = torch.randn(len(rows), 3, dtype=torch.float64) * real.unsqueeze(-1)
    grad_weights = torch.randn(len(rows), dtype=torch.float64) * real
    expected = torch.autograd.grad((rows, row_weights), (x, weights), (grad_rows, grad_weights))
    for mine, theirs in zip(route.dispatch_backward(grad_rows, grad_weights).wait(), expected):
        torch.testing.assert_close(mine, theirs)
    moved = torch.randn(len(rows), 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(route.combine(moved).wait(), moved, grad)[0]
    torch.testing.assert_close(route.combine_backward(grad).wait()[real], expected[real])
