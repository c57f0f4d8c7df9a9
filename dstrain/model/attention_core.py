"""softmax(scale · q kᵀ + mask) v, the only quadratic part of the model.

On CUDA this is PyTorch's fused attention. On the CPU it runs by blocks of query rows as plain matrix products,
which never look at keys after the block; backward computes the probabilities again.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.stand_in import on_cuda

BLOCK_ROWS = 128


def attention_core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention.

    q [B, H, Lq, Dk], k [B, H, Lk, Dk], v [B, H, Lk, Dv] -> [B, H, Lq, Dv]. The queries are the last Lq of the Lk
    positions. starts int64 [B, Lq]: the first key that a query may see; None: all of them.
    """
    if on_cuda(q):
        length, keys = q.shape[2], k.shape[2]
        mask = None
        if starts is not None or length != keys:
            mask = visible(0, length, keys, keys - length, starts, q.device)
        if q.is_meta:
            return _FusedWithoutData.apply(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return _BlockedAttention.apply(q, k, v, scale, starts)


def attention_core_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: torch.Tensor | None, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of the result, for whoever kept none of them and has computed them again."""
    if on_cuda(q):  # PyTorch's fused backward needs what its forward keeps
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(attention_core(*inputs, scale, starts), inputs, grad)
    return _blocked_backward(q.contiguous(), k.contiguous(), v.contiguous(), scale, starts, grad)


def visible(
    first: int, last: int, keys: int, offset: int, starts: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Which of `keys` keys the queries [first, last) see, bool [1 or B, 1, last - first, keys]."""
    query = torch.arange(first, last, device=device).unsqueeze(-1) + offset
    key = torch.arange(keys, device=device)
    seen = (key <= query).unsqueeze(0)
    if starts is not None:
        seen = seen & (key >= starts[:, first:last].unsqueeze(-1))
    return seen.unsqueeze(1)


class _FusedWithoutData(torch.autograd.Function):
    """What PyTorch's fused kernels give and keep, as shapes: inputs, result and each row's log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class _BlockedAttention(torch.autograd.Function):
    """q, k, v contiguous, so that a slice of rows is a plain matrix with a stride and no product copies it."""

    @staticmethod
    def forward(ctx, q, k, v, scale, starts):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        length, offset = q.shape[2], k.shape[2] - q.shape[2]
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        for first in range(0, length, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, length)
            out[:, :, first:last] = _probabilities(q, k, scale, starts, first, last) @ v[:, :, : last + offset]
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.starts = scale, starts
        return out

    @staticmethod
    def backward(ctx, grad):
        return *_blocked_backward(*ctx.saved_tensors, ctx.scale, ctx.starts, grad), None, None


def _blocked_backward(q, k, v, scale, starts, grad):
    length, offset = q.shape[2], k.shape[2] - q.shape[2]
    grad = grad.contiguous()
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for first in range(0, length, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, length)
        keys = last + offset
        probs = _probabilities(q, k, scale, starts, first, last)
        grad_block = grad[:, :, first:last]
        grad_v[:, :, :keys] += probs.transpose(-1, -2) @ grad_block
        grad_probs = grad_block @ v[:, :, :keys].transpose(-1, -2)
        # dS = P ∘ (dP - Σ dP ∘ P), in one pass, FP32 inside
        grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, q.dtype)
        grad_q[:, :, first:last] = grad_scores @ k[:, :, :keys]
        grad_k[:, :, :keys] += grad_scores.transpose(-1, -2) @ q[:, :, first:last]
    return grad_q.mul_(scale), grad_k.mul_(scale).to(k.dtype), grad_v.to(v.dtype)


def _probabilities(q, k, scale, starts, first, last):
    """Attention probabilities of one block of query rows; the softmax is FP32 inside, whatever the type."""
    offset = k.shape[2] - q.shape[2]
    scores = (q[:, :, first:last] * scale) @ k[:, :, : last + offset].transpose(-1, -2)
    if starts is None:  # only the block on the diagonal holds keys that come after a query
        diagonal = scores[..., first + offset :]
        diagonal.masked_fill_(~visible(0, last - first, last - first, 0, None, q.device), -torch.inf)
    else:
        scores.masked_fill_(~visible(first, last, last + offset, offset, starts, q.device), -torch.inf)
    return scores.softmax(dim=-1)
