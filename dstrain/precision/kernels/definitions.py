"""What the fused kernels compute, in plain PyTorch: the specification that they are compared with.

The quantisers' own definitions are `fp8_tiles`, `fp8_blocks` and `e5m6`. A fused kernel equals its composition here but
for the last bit of FP32 sums, exponentials and multiply-adds, which a rounding to E4M3 rarely turns into one step.
"""

import torch

from dstrain.precision.fp8_tiles import dequantize_rows, quantize_columns, quantize_rows
from dstrain.precision.kernels.tiles import fill_tiles
from dstrain.precision.pointwise import (
    rms_norm_forward,
    swiglu_backward,
    swiglu_forward,
    weighted_swiglu_backward,
    weighted_swiglu_forward,
)


def columns(x, offsets=None, power_of_two=True):
    """`fp8_tiles.quantize_columns` in the layout of `tiles.quantize_columns`."""
    codes, scale = quantize_columns(x, offsets, power_of_two)
    return (codes if offsets is None else fill_tiles(codes, offsets)), scale


def swiglu_quantize(gate, up, weight=None, power_of_two=True):
    """See `swiglu.swiglu_quantize`."""
    out = swiglu_forward(gate, up) if weight is None else weighted_swiglu_forward(gate, up, weight)
    return tuple(quantize_rows(x, power_of_two) for x in (out, gate, up))


def swiglu_backward_quantize(grad, gate, up, weight=None, offsets=None, power_of_two=True):
    """See `swiglu.swiglu_backward_quantize`."""
    gate, up, dweight = dequantize_rows(*gate, grad.dtype), dequantize_rows(*up, grad.dtype), None
    if weight is None:
        out, (dgate, dup) = swiglu_forward(gate, up), swiglu_backward(grad, gate, up)
    else:
        out = weighted_swiglu_forward(gate, up, weight)
        dgate, dup, dweight = weighted_swiglu_backward(grad, gate, up, weight)
    both = [(quantize_rows(x, power_of_two), columns(x, offsets, power_of_two)) for x in (dgate, dup)]
    return columns(out, offsets, power_of_two), *both, dweight


def rms_norm_quantize(x, weight, eps, power_of_two=True):
    """See `rms_norm.rms_norm_quantize`."""
    y, inverse_rms = rms_norm_forward(x, weight, eps)
    return quantize_rows(y, power_of_two), inverse_rms


def permute(codes, scales, index):
    """See `permute.permute`."""
    return codes.view(torch.uint8)[index.long()].view(codes.dtype), scales[index.long()]


def unpermute(rows, slots):
    """See `permute.unpermute`."""
    total = rows.new_zeros(len(slots), rows.shape[1], dtype=torch.float32)
    for choice in slots.long().unbind(1):
        total += torch.where((choice >= 0).unsqueeze(-1), rows[choice.clamp_min(0)].float(), 0.0)
    return total.to(rows.dtype)
