"""The matrix products of a Linear and of a grouped Linear: the seam behind which a number format lives.

    Fprop  y  = x Wᵀ        Dgrad  dx = dy W        Wgrad  dW += dyᵀ x   (into main_grad)

Grouped: rows [offsets[e-1], offsets[e]) belong to expert e. Operands are of one type; dW is of the main type.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.few import (
    FEW_GROUPED, few_linear, grouped_weight_first, takes_loops, takes_weight_first, weight_first,
)
from dstrain.precision.stand_in import on_cuda


def fprop(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    if takes_loops(x):
        return few_linear(x, weight)
    return weight_first(x, weight) if takes_weight_first(x) else F.linear(x, weight)


def dgrad(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """grad [rows, out], weight [out, in] -> [rows, in]."""
    return grad @ weight


def wgrad(grad: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += gradᵀ x."""
    if grad.dtype == main_grad.dtype:
        main_grad.addmm_(grad.t(), x)
    elif on_cuda(grad):
        main_grad.add_(torch.mm(grad.t(), x, out_dtype=main_grad.dtype))
    else:  # the CPU has no BF16 product with an FP32 result; the sum over micro-batches is FP32 all the same
        main_grad.add_(grad.t() @ x)


def grouped_fprop(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [rows, in], weight [experts, out, in], offsets int32 [experts] -> [rows, out]."""
    if len(x) <= FEW_GROUPED and takes_weight_first(x[:1]):
        return grouped_weight_first(x, weight, groups(offsets))
    return _grouped_mm(x, weight.transpose(-2, -1), offsets)


def grouped_dgrad(grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """grad [rows, out], weight [experts, out, in] -> [rows, in]."""
    return _grouped_mm(grad, weight, offsets)


def grouped_wgrad(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [experts, out, in] += gradᵀ x, expert by expert; an expert without rows adds nothing."""
    if x.is_meta:  # no loads to be read, see `stand_in`; a GPU's product is written whole before it is added
        if on_cuda(grad):
            main_grad.add_(grad.new_empty(main_grad.shape))
    elif grad.is_cuda and _takes_grouped_mm(grad, x):
        main_grad.add_(F.grouped_mm(grad.t(), x, offs=offsets))
    else:  # also where a CPU could: it loops too, over all experts, into a copy of the whole gradient
        for expert, rows in groups(offsets):
            wgrad(grad[rows], x[rows], main_grad[expert])


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [rows, k], weight [experts, k, n] -> [rows, n]."""
    if x.is_meta:
        return x.new_empty(x.shape[0], weight.shape[-1])
    if _takes_grouped_mm(x, weight):
        return F.grouped_mm(x, weight, offs=offsets)
    out = x.new_empty(x.shape[0], weight.shape[-1])
    for expert, rows in groups(offsets):
        torch.mm(x[rows], weight[expert], out=out[rows])
    return out


def _takes_grouped_mm(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these: no FP64, and rows of whole 16 bytes. Models' sizes are such."""
    lengths = (x.shape[-1], other.shape[-1], other.shape[-2] if other.ndim == 3 else 0)
    return x.dtype != torch.float64 and len(x) > 0 and not any(n * x.itemsize % 16 for n in lengths)


def groups(offsets: torch.Tensor):
    """(expert, slice of its rows) for every expert that has rows."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
