"""Linear and grouped Linear in FP8: three products of E4M3 operands, and what waits for backward in between.

    Fprop  y = x Wᵀ: x in 1x128 tiles, W in 128x128 blocks       Dgrad  dx = dy W: dy in 1x128 tiles
    Wgrad  dW += dyᵀ x: both in 128x1 tiles; x from what was kept of it, which is one of

        1x128 E4M3 tiles, dequantised and requantised            (the rule)
        nothing: x is computed again from what is kept anyway    (the output of a norm)
        E5M6                                                     (the input of the Linear after attention)

No BF16 input waits for backward. Weights are quantised once and used until they change.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from dstrain.precision.fp8_gemm import GemmBackend, Scaled
from dstrain.precision.main_grad import now_or_deferred
from dstrain.precision.pointwise import RMSNorm, rms_norm_backward


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
    x: torch.Tensor, weight: nn.Parameter, backend: GemmBackend, offsets: torch.Tensor | None = None, e5m6: bool = False
) -> torch.Tensor:
    """x [..., in] BF16; weight [out, in], or with offsets (int32 [experts], the ends of the experts' rows)
    [experts, out, in] -> [..., out]. e5m6: how x is kept."""
    tiles, kept = keep(x, backend, e5m6=e5m6)
    return _Fp8Linear.apply(x, tiles, kept, backend, offsets, weight)


def keep(
    x: torch.Tensor, backend: GemmBackend, again: Callable[[], torch.Tensor] | None = None, e5m6: bool = False
) -> tuple[Scaled, Kept | None]:
    """x [..., cols] as Fprop takes it, and what waits for backward of it; None where there will be none."""
    x = x.detach().reshape(-1, x.shape[-1])
    if not torch.is_grad_enabled():
        return backend.quantize_operand(x), None
    if again is not None:
        return backend.quantize_operand(x), ComputedAgain(again)
    if e5m6:
        return backend.quantize_operand(x), KeptE5M6(*backend.quantize_e5m6(x), x.shape[-1])
    tiles = backend.quantize_rows(x)
    return tiles, KeptTiles(tiles)


def fp8_normed_linear(
    x: torch.Tensor, norm: RMSNorm, weights: Sequence[nn.Parameter], backend: GemmBackend, again: bool
) -> tuple[torch.Tensor, ...]:
    """norm(x) through one or more Linears, quantised and kept once. -> an output [..., out] for each weight [out, in].

    x [..., in]. again: the norm is computed once more in backward; else its output is kept in tiles. No pass over memory
    writes that output where the backend's norm quantises.
    """
    x_2d = x.detach().reshape(-1, x.shape[-1])
    tiles, inverse_rms = backend.rms_norm(x_2d, norm.weight.detach(), norm.eps, keep=torch.is_grad_enabled() and not again)
    kept = ComputedAgain(norm.again(x)) if again else KeptTiles(tiles)
    return _Fp8NormedLinear.apply(x, norm.weight, inverse_rms, tiles, kept, backend, *weights)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tiles, kept, backend, offsets, weight):
        (output,) = _forward(ctx, x, tiles, kept, backend, offsets, (weight,))
        return output

    @staticmethod
    def backward(ctx, grad):
        return _backward(ctx, (grad,), ctx.needs_input_grad[0]), None, None, None, None, None


class _Fp8NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, inverse_rms, tiles, kept, backend, *weights):
        ctx.save_for_backward(x, norm_weight, inverse_rms)
        return tuple(_forward(ctx, x, tiles, kept, backend, None, weights))

    @staticmethod
    def backward(ctx, *grads):
        x, norm_weight, inverse_rms = ctx.saved_tensors
        grad, rows = _backward(ctx, grads, wanted=True), (-1, x.shape[-1])
        grad_x, grad_norm = rms_norm_backward(grad.reshape(rows), x.reshape(rows), norm_weight, inverse_rms)
        return grad_x.view(x.shape), grad_norm, *(None for _ in range(4 + len(ctx.weights)))


def _forward(ctx, x, tiles, kept, backend, offsets, weights):
    ctx.kept, ctx.backend, ctx.offsets, ctx.weights, ctx.dtype = kept, backend, offsets, weights, x.dtype
    outputs = (product(backend, tiles, kept_weight(weight, backend)[0], offsets, x.dtype) for weight in weights)
    return [output.view(*x.shape[:-1], output.shape[-1]) for output in outputs]


def _backward(ctx, grads, wanted):
    """Weight gradients now or deferred; -> if it is wanted, the gradient of what was quantised."""
    backend, offsets, weights, kept = ctx.backend, ctx.offsets, ctx.weights, ctx.kept
    ctx.kept = None  # from here on the closure's
    shape = grads[0].shape[:-1]
    grad_x, grad_columns = None, []
    for grad, weight in zip(grads, weights):
        rows, columns = backend.quantize_both(grad.reshape(-1, grad.shape[-1]), offsets)
        grad_columns.append(columns)
        if wanted:
            part = product(backend, rows, kept_weight(weight, backend)[1], offsets, ctx.dtype)
            grad_x = part if grad_x is None else grad_x + part

    def weight_gradients():
        x_columns = kept.columns(backend, offsets)
        for columns, weight in zip(grad_columns, weights):
            accumulate(backend, columns, x_columns, offsets, weight.main_grad)

    now_or_deferred(weight_gradients)
    return grad_x if grad_x is None else grad_x.view(*shape, grad_x.shape[-1])


def product(
    backend: GemmBackend, a: Scaled, b: Scaled, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return backend.matmul(a, b, dtype) if offsets is None else backend.grouped_matmul(a, b, offsets, dtype)


def accumulate(
    backend: GemmBackend, a: Scaled, b: Scaled, offsets: torch.Tensor | None, out: torch.Tensor
) -> None:
    if offsets is None:
        backend.accumulate(a, b, out)
    else:
        backend.grouped_accumulate(a, b, offsets, out)


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
