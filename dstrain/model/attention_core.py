"""softmax(scale · q kᵀ + mask) v, the only quadratic part of the model.

On CUDA this is PyTorch's fused attention. On the CPU it runs by blocks of query rows as plain matrix products,
which never look at keys after the block; backward computes the probabilities again from the row sums.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.policy import at_least_fp32

BLOCK_ROWS = 128


def attention_core(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention.

    q [B, H, Lq, Dk], k [B, H, Lk, Dk], v [B, H, Lk, Dv] -> [B, H, Lq, Dv]. The queries are the last Lq of the Lk
    positions. starts int64 [B, Lq]: the first key that a query may see; None: all of them.
    """
    if q.is_cuda:
        length, keys = q.shape[2], k.shape[2]
        mask = None
        if starts is not None or length != keys:
            mask = visible(0, length, keys, keys - length, starts, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return _BlockedAttention.apply(q, k, v, scale, starts)


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


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, starts):
        length, offset = q.shape[2], k.shape[2] - q.shape[2]
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        wide = torch.promote_types(q.dtype, torch.float32)
        log_sums = q.new_empty(q.shape[:3], dtype=wide)
        for first in range(0, length, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, length)
            scores = _scores(q, k, scale, starts, first, last, offset)
            log_sums[:, :, first:last] = log_sum = torch.logsumexp(scores, dim=-1)
            probs = scores.sub_(log_sum.unsqueeze(-1)).exp_().to(q.dtype)
            out[:, :, first:last] = probs @ v[:, :, : last + offset]
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.scale, ctx.starts = scale, starts
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, log_sums = ctx.saved_tensors
        length, offset = q.shape[2], k.shape[2] - q.shape[2]
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        # Row sums of P ∘ dP, which equal those of dO ∘ O.
        row_sums = (at_least_fp32(grad) * at_least_fp32(out)).sum(-1, keepdim=True)
        for first in reversed(range(0, length, BLOCK_ROWS)):
            last = min(first + BLOCK_ROWS, length)
            keys = last + offset
            scores = _scores(q, k, ctx.scale, ctx.starts, first, last, offset)
            probs = scores.sub_(log_sums[:, :, first:last].unsqueeze(-1)).exp_()
            grad_block = grad[:, :, first:last]
            grad_v[:, :, :keys] += probs.to(v.dtype).transpose(-1, -2) @ grad_block
            grad_probs = at_least_fp32(grad_block @ v[:, :, :keys].transpose(-1, -2))
            grad_scores = grad_probs.sub(row_sums[:, :, first:last]).mul_(probs).mul_(ctx.scale).to(q.dtype)
            grad_q[:, :, first:last] = grad_scores @ k[:, :, :keys]
            grad_k[:, :, :keys] += grad_scores.transpose(-1, -2) @ q[:, :, first:last]
        return grad_q, grad_k, grad_v, None, None


def _scores(q, k, scale, starts, first, last, offset):
    """Masked scores of one block of query rows in at least FP32, a fresh tensor."""
    keys = last + offset
    scores = (q[:, :, first:last] @ k[:, :, :keys].transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    scores.mul_(scale)
    return scores.masked_fill_(~visible(first, last, keys, offset, starts, q.device), -torch.inf)
