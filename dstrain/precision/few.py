"""Products of a few tokens, which are bound by the reading of weights and by the number of calls.

For code that torch.compile turns into loops nothing is gathered, sorted or padded, and the loops are fused with what is
around them; run operation by operation, they would copy every weight they touch. Other code on the CPU has the weight as
the product's first operand: in FP32 the library reads it two to three times as fast then, in BF16 by a fifth.
"""

from collections.abc import Iterable

import torch

from dstrain.precision.widen import at_least_fp32

FEW_TOKENS = 16  # up to so many tokens at once decoding runs compiled
FEW_ROWS = 3  # up to so many rows a compiled loop over a Linear's weight is faster than the CPU's matrix product
WEIGHT_FIRST = 8  # up to so many rows the product with the weight first is the faster one on the CPU
FEW_GROUPED = 128  # up to so many rows of all experts together are looked at expert by expert


def takes_loops(x: torch.Tensor) -> bool:
    """Whether the product of x [..., in] with a weight is to be a loop, in code that is being compiled."""
    return torch.compiler.is_compiling() and not x.is_cuda and x.numel() // x.shape[-1] <= FEW_ROWS


def few_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in], weight [out, in] -> [..., out]; summed in at least FP32.

    A sum for each row, which the compiler joins into one loop: the weight is read once.
    """
    wide = at_least_fp32(weight)
    rows = [(wide * row).sum(-1) for row in at_least_fp32(x).reshape(-1, x.shape[-1])]
    return torch.stack(rows).to(x.dtype).view(*x.shape[:-1], -1)


def takes_weight_first(x: torch.Tensor) -> bool:
    """Whether `weight_first` is the way to multiply x [..., in]; in BF16 only where loops take up its result."""
    faster = x.dtype == torch.float32 or x.dtype == torch.bfloat16 and torch.compiler.is_compiling()
    return faster and x.device.type == "cpu" and 0 < x.numel() <= WEIGHT_FIRST * x.shape[-1]


def weight_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1:  # the library's product with one vector is half as fast as that with two
        return (weight @ torch.cat((rows, rows)).t())[:, 0].reshape(*x.shape[:-1], -1)
    return (weight @ rows.t()).t().contiguous().view(*x.shape[:-1], -1)


def grouped_weight_first(
    x: torch.Tensor, weight: torch.Tensor, groups: Iterable[tuple[int, slice]]
) -> torch.Tensor:
    """x [rows, in] sorted by expert, weight [experts, out, in], groups: (expert, its rows), all of them -> [rows, out]."""
    twice = torch.repeat_interleave(x, 2, 0)  # for experts with one row
    parts = []
    for expert, rows in groups:
        one = rows.stop - rows.start == 1
        operand = twice[2 * rows.start : 2 * rows.stop] if one else x[rows]
        product = (weight[expert] @ operand.t()).t()
        parts.append(product[:1] if one else product)
    return torch.cat(parts)


def few_ffn(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The FFNs of the experts that each token chose, every choice reading its expert's matrices; their sum.

    x [T, hidden] in at least FP32: a loop would widen it once more for every row of a weight. topk_ids int64 [T, k],
    topk_weights [T, k], gate_up [experts, 2 n, hidden], down [experts, hidden, n] -> [T, hidden] of the weights' type,
    to which it is rounded before and behind SwiGLU too, as `grouped_mlp` rounds.
    """
    dtype = gate_up.dtype

    def sums(weight):
        """[experts, n, hidden] -> [T, k, n]. One loop for all choices: it has several reads under way at once."""
        parts = [(at_least_fp32(weight[ids]) * x.unsqueeze(1)).sum(-1) for ids in topk_ids.unbind(1)]
        return torch.stack(parts, dim=1).to(dtype)

    gate, up = map(sums, gate_up.chunk(2, dim=1))
    wide = at_least_fp32(gate)
    inner = (torch.sigmoid(wide) * wide * up * topk_weights.unsqueeze(-1)).to(dtype)
    return (at_least_fp32(down[topk_ids]) * at_least_fp32(inner).unsqueeze(2)).sum((1, 3)).to(dtype)
