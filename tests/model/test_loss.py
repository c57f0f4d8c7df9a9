"""The head's loss and gradients, in several chunks, against PyTorch's cross-entropy in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dstrain.model import loss
from dstrain.model.batch import IGNORED
from dstrain.precision.main_grad import attach_main_grads


@pytest.mark.parametrize("rows", [1, 128, 129, 300])
def test_chunks_give_the_loss_and_gradients_of_the_whole(rows, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 1)  # the least chunk: 128 rows
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(rows, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    head = nn.Linear(12, 61, bias=False, dtype=torch.float64)
    targets = torch.randint(0, 61, (rows,), generator=generator)
    targets[::3] = IGNORED
    expected = F.cross_entropy(state @ head.weight.t(), targets, ignore_index=IGNORED, reduction="sum")
    grads = torch.autograd.grad(0.25 * expected, (state, head.weight))
    attach_main_grads(head, torch.float64)
    total = loss.head_loss(state, head.weight, targets, coefficient=0.25)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    total.backward()
    torch.testing.assert_close(state.grad, grads[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(head.weight.main_grad, grads[1], rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        total, correct = loss.head_scores(state, head.weight, targets)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.weight.main_grad, grads[1], rtol=1e-10, atol=1e-12)
    found = (state @ head.weight.t()).argmax(-1)
    assert correct == sum(int(best) == target for best, target in zip(found, targets.tolist()))
    assert loss.head_scores(state.detach(), head.weight, found)[1] == rows
    flat = torch.zeros_like(head.weight)  # among equal logits id 0 is the greedy choice
    assert loss.head_scores(state.detach(), flat, torch.arange(rows) % 61)[1] == -(-rows // 61)
