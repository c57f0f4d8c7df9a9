"""RMSNorm, SwiGLU and rotation: computed in at least FP32, kept for backward in the compute type.

Each is a pair of plain functions, forward and backward, that PyTorch may run operation by operation or, after
`compile_kernels()`, as one fused pass over memory.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from dstrain.precision.widen import at_least_fp32

_kernels = {}


def kernel(function):
    """A function of tensors that runs eagerly until `compile_kernels`."""
    _kernels[function.__name__] = function

    @functools.wraps(function)
    def call(*args, **named):
        return _kernels[function.__name__](*args, **named)

    return call


compiled = False  # whether compile_kernels was called


def compile_kernels() -> None:
    """From now on run every kernel fused by torch.compile, for any number of rows."""
    global compiled
    compiled = True
    # A quantiser is a program per type, rule of scales and size 0 or 1; the default of 8 is too few.
    torch._dynamo.config.recompile_limit = 64
    for name, function in _kernels.items():
        _kernels[name] = torch.compile(function, dynamic=True, fullgraph=True)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; weight in at least FP32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.promote_types(dtype, torch.float32)))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and type."""
        if not torch.is_grad_enabled():
            return rms_norm_forward(x.reshape(-1, x.shape[-1]), self.weight, self.eps)[0].view(x.shape)
        return _RMSNorm.apply(x, self.weight, self.eps)

    def again(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that computes forward(x) once more, [rows, size] without autograd, and holds x alone."""
        x, weight = x.detach().reshape(-1, x.shape[-1]), self.weight.detach()
        return lambda: rms_norm_forward(x, weight, self.eps)[0]


@kernel
def rms_norm_forward(x, weight, eps):
    """x [rows, n], weight [n] -> y like x, 1 / rms [rows, 1]."""
    wide = at_least_fp32(x)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight).to(x.dtype), inverse_rms


@kernel
def rms_norm_backward(grad, x, weight, inverse_rms):
    """y = x / r with r = rms(x): dx = (g - y · mean(g y)) / r, where g = grad · weight. -> dx, dweight."""
    normalised = at_least_fp32(x) * inverse_rms
    grad = at_least_fp32(grad)
    grad_weight = (grad * normalised).sum(0)
    grad = grad * weight
    projection = (grad * normalised).mean(-1, keepdim=True)
    return ((grad - normalised * projection) * inverse_rms).to(x.dtype), grad_weight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, inverse_rms = rms_norm_forward(x.reshape(-1, x.shape[-1]), weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse_rms = ctx.saved_tensors
        rows = (-1, x.shape[-1])
        grad_x, grad_weight = rms_norm_backward(grad.reshape(rows), x.reshape(rows), weight, inverse_rms)
        return grad_x.view(x.shape), grad_weight, None


def swiglu(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up, times a weight per row when given.

    gate, up [..., n]; weight [rows] in at least FP32, whose gradient has its type. Only the inputs are kept for
    backward; the output is computed again there.
    """
    if not torch.is_grad_enabled():
        return swiglu_forward(gate, up) if weight is None else weighted_swiglu_forward(gate, up, weight)
    return _SwiGLU.apply(gate, up) if weight is None else _WeightedSwiGLU.apply(gate, up, weight)


@kernel
def swiglu_forward(gate, up):
    wide = at_least_fp32(gate)
    return (torch.sigmoid(wide) * wide * up).to(gate.dtype)


@kernel
def swiglu_backward(grad, gate, up):
    """silu' = σ(1 + x(1 - σ)). -> dgate, dup."""
    grad, wide = at_least_fp32(grad), at_least_fp32(gate)
    sigmoid = torch.sigmoid(wide)
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    return (grad * up * slope).to(gate.dtype), (grad * sigmoid * wide).to(up.dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx, grad):
        return swiglu_backward(grad, *ctx.saved_tensors)


@kernel
def weighted_swiglu_forward(gate, up, weight):
    wide = at_least_fp32(gate)
    return (torch.sigmoid(wide) * wide * up * weight.unsqueeze(-1)).to(gate.dtype)


@kernel
def weighted_swiglu_backward(grad, gate, up, weight):
    """-> dgate, dup, dweight."""
    grad, wide = at_least_fp32(grad), at_least_fp32(gate)
    sigmoid = torch.sigmoid(wide)
    silu = sigmoid * wide
    grad_weight = (silu * up * grad).sum(-1)
    grad = grad * weight.unsqueeze(-1)
    slope = sigmoid * (1 + wide * (1 - sigmoid))
    return (grad * up * slope).to(gate.dtype), (grad * silu).to(up.dtype), grad_weight


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return weighted_swiglu_forward(gate, up, weight)

    @staticmethod
    def backward(ctx, grad):
        return weighted_swiglu_backward(grad, *ctx.saved_tensors)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., d] with each pair (2j, 2j + 1) times [[cos, -sin], [sin, cos]]; cos, sin [..., d/2] broadcast to x."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else rotate_forward(x, cos, sin)


@kernel
def rotate_forward(x, cos, sin):
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate_forward(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate_forward(grad, cos, -sin), None, None  # the transpose turns the other way
