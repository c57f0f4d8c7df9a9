"""The local dispatcher: rows in expert order, sums per token, and mirrors that are transposes (FAULTS B14)."""

import torch

from dstrain.parallel.dispatch import LocalDispatcher

IDS = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
WEIGHTS = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.25], [0.1, 0.9]], dtype=torch.float64)


def test_rows_are_sorted_by_expert_then_token_with_their_weights():
    route = LocalDispatcher().route(IDS, experts=4)
    x = torch.arange(4.0, dtype=torch.float64).unsqueeze(-1)
    rows, weights = route.dispatch(x, WEIGHTS)
    assert rows.flatten().tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert weights.tolist() == [0.3, 0.6, 0.1, 0.4, 0.25, 0.7, 0.5, 0.9]
    assert route.offsets.tolist() == [3, 5, 8, 8]


def test_identity_experts_give_each_token_times_the_sum_of_its_weights():
    route = LocalDispatcher().route(IDS, experts=4)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, weights = route.dispatch(x, WEIGHTS)
    torch.testing.assert_close(route.combine(rows * weights.unsqueeze(-1)), x * WEIGHTS.sum(1, keepdim=True))


def test_each_backward_is_the_transpose_of_its_forward():
    route = LocalDispatcher().route(IDS, experts=4)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = WEIGHTS.clone().requires_grad_()
    rows, row_weights = route.dispatch(x, weights)
    grad_rows, grad_weights = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    expected = torch.autograd.grad((rows, row_weights), (x, weights), (grad_rows, grad_weights))
    for mine, theirs in zip(route.dispatch_backward(grad_rows, grad_weights), expected):
        torch.testing.assert_close(mine, theirs)
    moved = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(route.combine_backward(grad), torch.autograd.grad(route.combine(moved), moved, grad)[0])
