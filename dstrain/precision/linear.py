"""Linear, grouped Linear and embedding: the only places where a weight meets a matrix product.

Their backward is split: the gradient of the input is returned, the gradient of the weight goes to `main_grad`
through `now_or_deferred`, so that a schedule can move it. Autograd never sees a weight gradient. With a backend for
FP8 their products are those of `fp8_linear`; weights are of the compute type all the same.
"""

from collections.abc import Callable

import torch
from torch import nn

from dstrain.precision import gemm
from dstrain.precision.fp8_ffn import fp8_ffn
from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.fp8_linear import fp8_linear, fp8_normed_linear, kept_weight
from dstrain.precision.main_grad import now_or_deferred
from dstrain.precision.pointwise import RMSNorm, swiglu
from dstrain.precision.stand_in import on_cuda


class Linear(nn.Module):
    """y = x Wᵀ; weight [out_features, in_features], no bias."""

    joined: torch.Tensor | None = None  # see `join`

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, fp8: GemmBackend | None = None):
        super().__init__()
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, x: torch.Tensor, e5m6: bool = False) -> torch.Tensor:
        """x [..., in_features] of the weight's type -> [..., out_features]. e5m6: how FP8 keeps x for backward."""
        if self.fp8 is not None:
            return fp8_linear(x, self.weight, self.fp8, e5m6=e5m6)
        return linear(x, self.weight)

    def dense_weight(self) -> torch.Tensor:
        """The weight as the products see it, in the compute type; not for training."""
        if self.fp8 is None:
            return self.weight
        return self.fp8.dequantize_weight(kept_weight(self.weight, self.fp8)[0], self.weight.dtype)


def linear(
    x: torch.Tensor, weight: nn.Parameter, again: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor:
    """x [..., in], weight [out, in] with a main_grad if gradients are wanted -> [..., out].

    again: computes x [rows, in] once more in backward, in any type that holds it exactly, so that x need not be kept.
    """
    if not torch.is_grad_enabled():
        return gemm.fprop(x, weight)
    return _Linear.apply(x, weight, again)


def normed_linears(x: torch.Tensor, norm: RMSNorm, *layers: Linear, again: bool = False) -> tuple[torch.Tensor, ...]:
    """norm(x) through one or more Linears; FP8 quantises it once, and with `again` keeps x alone for backward."""
    if layers[0].fp8 is not None:
        return fp8_normed_linear(x, norm, [layer.weight for layer in layers], layers[0].fp8, again)
    return _same_input(norm(x), *layers)


def _same_input(x, *layers):
    if layers[0].joined is not None:
        return linear(x, layers[0].joined).split([len(layer.weight) for layer in layers], dim=-1)
    return tuple(layer(x) for layer in layers)


class GroupedLinear(nn.Module):
    """One Linear an expert; weight [experts, out_features, in_features]."""

    joined: torch.Tensor | None = None  # see `join`

    def __init__(
        self, experts: int, in_features: int, out_features: int, dtype: torch.dtype, fp8: GemmBackend | None = None
    ):
        super().__init__()
        self.fp8 = fp8
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=dtype))

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows [n, in_features] sorted by expert, offsets int32 [experts] their ends -> [n, out_features]."""
        if self.fp8 is not None:
            return fp8_linear(rows, self.weight, self.fp8, offsets)
        return _grouped_linear(rows, self.weight, offsets)


def _grouped_linear(rows, weight, offsets):
    if not torch.is_grad_enabled():
        return gemm.grouped_fprop(rows, weight, offsets)
    return _GroupedLinear.apply(rows, weight, offsets)


def join(*layers: Linear | GroupedLinear) -> None:
    """From now on one product serves layers that always take the same input; FP8 stays as it is.

    For weights that do not change any more: they become slices of one matrix, of which the first layer knows. Writing
    into them is seen, moving them is not.
    """
    if layers[0].fp8 is not None:
        return
    joined = torch.cat([layer.weight.detach() for layer in layers], dim=-2)
    for layer, part in zip(layers, joined.split([layer.weight.shape[-2] for layer in layers], dim=-2)):
        layer.weight.data = part
    layers[0].joined = joined


def mlp(
    x: torch.Tensor, gate: Linear, up: Linear, down: Linear, again: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor:
    """x [..., hidden] -> down(silu(gate(x)) · up(x)). again: what computes x once more, where FP8 need not keep it."""
    if gate.fp8 is not None:
        return fp8_ffn(x, gate.weight, up.weight, down.weight, gate.fp8, again=again)
    return down(swiglu(*_same_input(x, gate, up)))


def grouped_mlp(
    rows: torch.Tensor, row_weights: torch.Tensor, offsets: torch.Tensor,
    gate: GroupedLinear, up: GroupedLinear, down: GroupedLinear,
) -> torch.Tensor:
    """rows [n, hidden] sorted by expert, offsets int32 [experts] their ends, row_weights [n] in at least FP32 ->
    down(silu(gate(rows)) · up(rows) · row_weights)."""
    if gate.fp8 is not None:
        return fp8_ffn(rows, gate.weight, up.weight, down.weight, gate.fp8, row_weights, offsets)
    if gate.joined is not None:
        gated = _grouped_linear(rows, gate.joined, offsets).chunk(2, dim=-1)
    else:
        gated = gate(rows, offsets), up(rows, offsets)
    return down(swiglu(*gated, row_weights), offsets)


class Embedding(nn.Module):
    """Rows of weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [...] -> [..., hidden_size]."""
        if not torch.is_grad_enabled():
            return self.weight[ids]
        return _Embedding.apply(ids, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, again):
        x_2d = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_2d if again is None else None)
        ctx.weight, ctx.again = weight, again
        return gemm.fprop(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x,), weight, again = ctx.saved_tensors, ctx.weight, ctx.again
        grad_2d = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = gemm.dgrad(grad_2d, weight).view(*grad.shape[:-1], weight.shape[1])
        now_or_deferred(lambda: gemm.wgrad(grad_2d, x if again is None else again().to(grad.dtype), weight.main_grad))
        return grad_x, None, None


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
        if on_cuda(main_grad):
            main_grad.index_put_((ids,), grad, accumulate=True)
        else:
            main_grad.index_add_(0, ids, grad)
        return None, None
