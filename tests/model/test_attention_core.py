"""The blocked attention against a plain float64 softmax, forward and backward, over odd sizes."""

import pytest
import torch

from dstrain.model.attention_core import attention_core


def plain(q, k, v, scale, starts):
    length, keys = q.shape[2], k.shape[2]
    query, key = torch.arange(length).unsqueeze(-1) + keys - length, torch.arange(keys)
    seen = (key <= query).expand(q.shape[0], 1, length, keys)
    if starts is not None:
        seen = seen & (key >= starts.view(-1, 1, length, 1))
    scores = (scale * q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("length, keys", [(1, 1), (127, 127), (129, 129), (300, 300), (5, 140)])
@pytest.mark.parametrize("documents", [False, True])
def test_blocked_attention_equals_the_definition(length, keys, documents):
    generator = torch.Generator().manual_seed(0)
    make = lambda rows, dim: torch.randn(2, 3, rows, dim, dtype=torch.float64, generator=generator, requires_grad=True)
    q, k, v = make(length, 6), make(keys, 6), make(keys, 4)
    starts = None
    if documents:
        offset = keys - length
        starts = torch.stack([(torch.arange(length) + offset) // size * size for size in (7, 50)])
    grad = torch.randn(2, 3, length, 4, dtype=torch.float64, generator=generator)
    out = attention_core(q, k, v, 0.3, starts)
    expected = plain(q, k, v, 0.3, starts)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad(x, (q, k, v), grad) for x in (out, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
