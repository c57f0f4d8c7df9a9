"""Linear and grouped Linear in FP8: three products of E4M3 operands, and what waits for backward in between.

    Fprop  y = x Wᵀ: x in 1x128 tiles, W in 128x128 blocks       Dgrad  dx = dy W: dy in 1x128 tiles
    Wgrad  dW += dyᵀ x: both in 128x1 tiles; x from what was kept of it, which is one of

        1x128 E4M3 tiles, dequantised and requantised            (the rule)
        nothing: x is computed again from what is kept anyway    (the output of a norm, of SwiGLU)
        E5M6                                                     (the input of the Linear after attention)

No BF16 input waits for backward. Weights are quantised once and used until they change.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from dstrain.precision.fp8_gemm import GemmBackend, Scaled
from dstrain.precision.main_grad import now_or_deferred
from dstrain.precision.pointwise import (
    swiglu_backward, swiglu_forward, weighted_swiglu_backward, weighted_swiglu_forward,
)


class Kept(Protocol):
    """A Linear's input on its way to the weight gradient."""

    def columns(self, backend: GemmBackend, offsets: torch.Tensor | None) -> Scaled:
        """As Wgrad takes it: 128x1 tiles, transposed."""


class KeptTiles(NamedTuple):
    tiles: Scaled

    def columns(self, backend, offsets):
        return backend.requantize_columns(self.tiles, offsets)


class KeptE5M6(NamedTuple):
    packed: torch.Tensor
    scale: torch.Tensor
    cols: int

    def columns(self, backend, offsets):
        return backend.e5m6_to_columns(self.packed, self.scale, self.cols)


class ComputedAgain(NamedTuple):
    compute: Callable[[], torch.Tensor]  # -> the input, [rows, cols]

    def columns(self, backend, offsets):
        return backend.quantize_columns(self.compute(), offsets)


def fp8_linear(
    x: torch.Tensor,
    weights: Sequence[nn.Parameter],
    backend: GemmBackend,
    offsets: torch.Tensor | None = None,
    again: Callable[[], torch.Tensor] | None = None,
    e5m6: bool = False,
) -> tuple[torch.Tensor, ...]:
    """One input through one or more Linears, quantised and kept once. -> an output [..., out] for each weight.

    x [..., in] BF16; weights [out, in], or with offsets (int32 [experts], the ends of the experts' rows) [experts, out, in].
    again: computes x [rows, in] once more in backward; e5m6: x is kept so.
    """
    x_2d = x.detach().reshape(-1, x.shape[-1])
    kept: Kept | None = None
    if torch.is_grad_enabled() and again is None and not e5m6:
        tiles = backend.quantize_rows(x_2d)
        kept = KeptTiles(tiles)
    else:
        tiles = backend.quantize_operand(x_2d)
        if torch.is_grad_enabled():
            kept = ComputedAgain(again) if again is not None else KeptE5M6(*backend.quantize_e5m6(x_2d), x.shape[-1])
    return _Fp8Linear.apply(x, tiles, kept, backend, offsets, *weights)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tiles, kept, backend, offsets, *weights):
        ctx.kept, ctx.backend, ctx.offsets, ctx.weights, ctx.dtype = kept, backend, offsets, weights, x.dtype
        outputs = (_product(backend, tiles, kept_weight(weight, backend)[0], offsets, x.dtype) for weight in weights)
        return tuple(output.view(*x.shape[:-1], output.shape[-1]) for output in outputs)

    @staticmethod
    def backward(ctx, *grads):
        backend, offsets, weights, kept = ctx.backend, ctx.offsets, ctx.weights, ctx.kept
        ctx.kept = None  # from here on the closure's
        shape = grads[0].shape[:-1]
        grad_x, grad_columns = None, []
        for grad, weight in zip(grads, weights):
            rows, columns = backend.quantize_both(grad.reshape(-1, grad.shape[-1]), offsets)
            grad_columns.append(columns)
            if ctx.needs_input_grad[0]:
                part = _product(backend, rows, kept_weight(weight, backend)[1], offsets, ctx.dtype)
                grad_x = part if grad_x is None else grad_x + part

        def weight_gradients():
            x_columns = kept.columns(backend, offsets)
            for columns, weight in zip(grad_columns, weights):
                if offsets is None:
                    backend.accumulate(columns, x_columns, weight.main_grad)
                else:
                    backend.grouped_accumulate(columns, x_columns, offsets, weight.main_grad)

        now_or_deferred(weight_gradients)
        grad_x = grad_x if grad_x is None else grad_x.view(*shape, grad_x.shape[-1])
        return grad_x, *(None for _ in range(4 + len(weights)))


def _product(backend, a, b, offsets, dtype):
    return backend.matmul(a, b, dtype) if offsets is None else backend.grouped_matmul(a, b, offsets, dtype)


def fp8_swiglu(
    gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, backend: GemmBackend
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """`pointwise.swiglu` whose inputs are kept in FP8. -> its output, and what computes that again from them."""
    kept = KeptSwiGLU(gate, up, weight, backend)
    return _Fp8SwiGLU.apply(gate, up, weight, kept), kept.output


class KeptSwiGLU:
    """SwiGLU's inputs as 1x128 tiles."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, backend: GemmBackend):
        self.backend, self.shape, self.dtype = backend, gate.shape, gate.dtype
        self.weight = None if weight is None else weight.detach()
        if torch.is_grad_enabled():
            self.tiles = [backend.quantize_rows(x.detach().reshape(-1, x.shape[-1])) for x in (gate, up)]

    def inputs(self) -> list[torch.Tensor]:
        """gate, up [rows, n] and the weight, if there is one."""
        wide = [self.backend.dequantize_rows(x, self.dtype) for x in self.tiles]
        return wide if self.weight is None else [*wide, self.weight]

    def output(self) -> torch.Tensor:
        return (swiglu_forward if self.weight is None else weighted_swiglu_forward)(*self.inputs())


class _Fp8SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, weight, kept):
        ctx.kept = kept
        return swiglu_forward(gate, up) if weight is None else weighted_swiglu_forward(gate, up, weight)

    @staticmethod
    def backward(ctx, grad):
        kept = ctx.kept
        backward = swiglu_backward if kept.weight is None else weighted_swiglu_backward
        grad_gate, grad_up, *grad_weight = backward(grad.reshape(-1, grad.shape[-1]), *kept.inputs())
        return grad_gate.view(kept.shape), grad_up.view(kept.shape), *(grad_weight or [None]), None


_writes_unseen = 0


def weights_were_written() -> None:
    """Call this after writing weights past PyTorch's version counter (a collective into a flat buffer, `.data`)."""
    global _writes_unseen
    _writes_unseen += 1


def kept_weight(weight: nn.Parameter, backend: GemmBackend) -> tuple[Scaled, Scaled]:
    """The weight as Fprop and Dgrad take it, quantised again only when it has changed."""
    state = (weight._version, weight.untyped_storage()._cdata, _writes_unseen, backend)
    if getattr(weight, "fp8_state", None) != state:
        weight.fp8_operands = None  # the old ones go before the new ones come
        weight.fp8_operands, weight.fp8_state = backend.quantize_weight(weight.detach()), state
    return weight.fp8_operands
