"""Products of a few tokens, for code that torch.compile turns into loops: nothing is gathered, sorted or padded.

Such products are bound by the reading of weights and by the number of calls, and the loops are fused with what is around
them. Run operation by operation, they would copy every weight they touch.
"""

import torch

from dstrain.precision.widen import at_least_fp32

FEW_TOKENS = 16  # up to so many tokens at once decoding runs compiled
FEW_ROWS = 2  # up to so many rows a compiled loop over a Linear's weight is faster than the CPU's matrix product


def takes_loops(x: torch.Tensor) -> bool:
    """Whether the product of x [..., in] with a weight is to be a loop, in code that is being compiled."""
    return torch.compiler.is_compiling() and not x.is_cuda and x.numel() // x.shape[-1] <= FEW_ROWS


def few_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in], weight [out, in] -> [..., out]; summed in at least FP32."""
    return (at_least_fp32(weight) * at_least_fp32(x).unsqueeze(-2)).sum(-1).to(x.dtype)


def few_ffn(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The FFNs of the experts that each token chose, every choice reading its expert's matrices; their sum.

    x [T, hidden], topk_ids int64 [T, k], topk_weights [T, k], gate_up [experts, 2 n, hidden], down [experts, hidden, n] ->
    [T, hidden]. Rounded to x's type before and behind SwiGLU, as `grouped_mlp` rounds.
    """
    gate, up = few_linear(x.unsqueeze(1), gate_up[topk_ids]).chunk(2, dim=-1)  # [T, k, n]
    wide = at_least_fp32(gate)
    inner = (torch.sigmoid(wide) * wide * up * topk_weights.unsqueeze(-1)).to(x.dtype)
    return (at_least_fp32(down[topk_ids]) * at_least_fp32(inner).unsqueeze(2)).sum((1, 3)).to(x.dtype)
