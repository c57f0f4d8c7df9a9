"""Linear, grouped Linear and embedding: the only places where a weight meets a matrix product.

Their backward is split: the gradient of the input is returned, the gradient of the weight goes to `main_grad`
through `now_or_deferred`, so that a schedule can move it. Autograd never sees a weight gradient.
"""

import torch
from torch import nn

from dstrain.precision import gemm
from dstrain.precision.main_grad import now_or_deferred


class Linear(nn.Module):
    """y = x Wᵀ; weight [out_features, in_features], no bias."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] of the weight's type -> [..., out_features]."""
        return linear(x, self.weight)


def linear(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """x [..., in], weight [out, in] with a main_grad if gradients are wanted -> [..., out]."""
    return _Linear.apply(x, weight)


class GroupedLinear(nn.Module):
    """One Linear an expert; weight [experts, out_features, in_features]."""

    def __init__(self, experts: int, in_features: int, out_features: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=dtype))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows [n, in_features] sorted by expert, offsets int32 [experts] their ends -> [n, out_features]."""
        return _GroupedLinear.apply(rows, self.weight, offsets)


class Embedding(nn.Module):
    """Rows of weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [...] -> [..., hidden_size]."""
        return _Embedding.apply(ids, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x_2d = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_2d)
        ctx.weight = weight
        return gemm.fprop(x_2d, weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_2d = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = gemm.dgrad(grad_2d, weight).view(*grad.shape[:-1], weight.shape[1])
        now_or_deferred(lambda: gemm.wgrad(grad_2d, x, weight.main_grad))
        return grad_x, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, offsets):
        ctx.save_for_backward(rows, offsets)
        ctx.weight = weight
        return gemm.grouped_fprop(rows, weight, offsets)

    @staticmethod
    def backward(ctx, grad):
        (rows, offsets), weight = ctx.saved_tensors, ctx.weight
        grad = grad.contiguous()
        grad_rows = gemm.grouped_dgrad(grad, weight, offsets) if ctx.needs_input_grad[0] else None
        now_or_deferred(lambda: gemm.grouped_wgrad(grad, rows, offsets, weight.main_grad))
        return grad_rows, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return weight[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,), main_grad = ctx.saved_tensors, ctx.weight.main_grad
        ids, grad = ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(main_grad.dtype)
        # Each of the two is the one that adds in a fixed order on its device, which exact resume needs.
        if main_grad.is_cuda:
            main_grad.index_put_((ids,), grad, accumulate=True)
        else:
            main_grad.index_add_(0, ids, grad)
        return None, None
