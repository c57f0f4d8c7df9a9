"""RMSNorm and SwiGLU: computed in at least FP32, kept for backward in the compute type."""

import torch
from torch import nn

from dstrain.precision.policy import at_least_fp32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; weight in at least FP32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.promote_types(dtype, torch.float32)))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and type."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = at_least_fp32(x)
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse_rms = ctx.saved_tensors
        normalised = at_least_fp32(x) * inverse_rms
        grad = at_least_fp32(grad)
        grad_weight = (grad * normalised).flatten(0, -2).sum(0)
        grad = grad * weight
        # y = x/r with r = rms(x): dx = (g - y · mean(g y)) / r
        projection = (grad * normalised).mean(-1, keepdim=True)
        grad_x = grad.sub_(normalised.mul_(projection)).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None


def swiglu(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up, times a weight per row when given.

    gate, up [rows, n]; weight [rows] in at least FP32, whose gradient has its type. Only the inputs are kept
    for backward; the output is computed again there.
    """
    return _SwiGLU.apply(gate, up, weight)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        wide = at_least_fp32(gate)
        out = torch.sigmoid(wide).mul_(wide).mul_(up)
        if weight is not None:
            out.mul_(weight.unsqueeze(-1))
        return out.to(gate.dtype)

    @staticmethod
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        grad, wide_gate, wide_up = at_least_fp32(grad), at_least_fp32(gate), at_least_fp32(up)
        sigmoid = torch.sigmoid(wide_gate)
        silu = sigmoid * wide_gate
        grad_weight = None
        if weight is not None:
            grad_weight = (silu * wide_up).mul_(grad).sum(-1)
            grad = grad * weight.unsqueeze(-1)
        grad_up = grad * silu
        # silu' = σ(1 + x(1 - σ)) = σ + silu(1 - σ)
        slope = sigmoid.add_(silu.mul_(1 - sigmoid))
        grad_gate = slope.mul_(wide_up).mul_(grad)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), grad_weight
