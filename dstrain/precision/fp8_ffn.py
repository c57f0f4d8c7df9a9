"""A SwiGLU MLP in FP8 as one step of the graph: what lies between its products is one pass over memory each way.

    forward    g = x Wgᵀ   u = x Wuᵀ   a = silu(g) · u · w   y = a Wdᵀ      keeps x as told, g and u in E4M3
    backward   da = dy Wd; of g and u as kept: dg, du, dw, and a again; dx = dg Wg + du Wu
    weights    dWd += dyᵀ a   dWg += dgᵀ x   dWu += duᵀ x                   now or deferred

What the products take of a, dg and du comes straight from `GemmBackend.swiglu` and `swiglu_backward`, which a backend may
fuse with their quantisation. Dense (the rows of x through one MLP) or grouped (each expert's rows through its own).
"""

from collections.abc import Callable

import torch
from torch import nn

from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.fp8_linear import Kept, accumulate, keep, kept_weight, product
from dstrain.precision.main_grad import now_or_deferred


def fp8_ffn(
    x: torch.Tensor,
    gate: nn.Parameter,
    up: nn.Parameter,
    down: nn.Parameter,
    backend: GemmBackend,
    weight: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    again: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """x [..., hidden] BF16 -> down(silu(gate(x)) · up(x) · weight), the same shape.

    gate, up [n, hidden], down [hidden, n], or with offsets (int32 [experts], the ends of the experts' rows) one of each an
    expert. weight: FP32 [rows], a factor of each row. again: computes x [rows, hidden] once more in backward.
    """
    tiles, kept = keep(x, backend, again)
    return _Fp8FFN.apply(x, tiles, kept, backend, offsets, weight, gate, up, down)


class _Fp8FFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tiles, kept: Kept | None, backend, offsets, weight, gate, up, down):
        wide = [product(backend, tiles, kept_weight(part, backend)[0], offsets, x.dtype) for part in (gate, up)]
        swiglu, ctx.inputs = backend.swiglu(*wide, weight, keep=kept is not None)
        ctx.kept, ctx.backend, ctx.offsets = kept, backend, offsets
        ctx.row_weight = None if weight is None else weight.detach()
        ctx.weights, ctx.dtype = (gate, up, down), x.dtype
        return product(backend, swiglu, kept_weight(down, backend)[0], offsets, x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        backend, offsets, dtype, (gate, up, down) = ctx.backend, ctx.offsets, ctx.dtype, ctx.weights
        kept, inputs, shape = ctx.kept, ctx.inputs, grad.shape
        ctx.kept = ctx.inputs = None  # from here on the closure's, or nobody's
        rows, grad_columns = backend.quantize_both(grad.reshape(-1, shape[-1]), offsets)
        grad_swiglu = product(backend, rows, kept_weight(down, backend)[1], offsets, dtype)
        swiglu_columns, (dgate, gate_columns), (dup, up_columns), grad_weight = backend.swiglu_backward(
            grad_swiglu, *inputs, ctx.row_weight, offsets
        )
        del inputs, grad_swiglu
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(backend, dgate, kept_weight(gate, backend)[1], offsets, dtype)
            grad_x = (grad_x + product(backend, dup, kept_weight(up, backend)[1], offsets, dtype)).view(shape)

        def weight_gradients():
            accumulate(backend, grad_columns, swiglu_columns, offsets, down.main_grad)
            x_columns = kept.columns(backend, offsets)
            for columns, part in ((gate_columns, gate), (up_columns, up)):
                accumulate(backend, columns, x_columns, offsets, part.main_grad)

        now_or_deferred(weight_gradients)
        return grad_x, None, None, None, None, grad_weight, None, None, None
