"""Feed-forward networks: the dense SwiGLU MLP, the routed experts on grouped GEMMs, and a MoE layer's parts."""

from collections.abc import Callable

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.router import Router
from dstrain.precision.few import few_ffn
from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.linear import GroupedLinear, Linear, grouped_mlp, join, mlp


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x)): a dense layer's FFN, and the shared experts as one."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, fp8: GemmBackend | None = None):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype, fp8)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype, fp8)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, fp8)

    def freeze(self) -> None:
        """Make ready for decoding, see `Model.freeze`."""
        join(self.gate_proj, self.up_proj)

    def forward(self, x: torch.Tensor, again: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        """x [..., hidden] -> [..., hidden]. again: what computes x once more, where it need not be kept."""
        return mlp(x, self.gate_proj, self.up_proj, self.down_proj, again)


class Experts(nn.Module):
    """The routed experts of a rank, each a SwiGLU MLP, over rows sorted by expert."""

    def __init__(
        self, experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, fp8: GemmBackend | None = None
    ):
        super().__init__()
        self.gate_proj = GroupedLinear(experts, hidden_size, intermediate_size, dtype, fp8)
        self.up_proj = GroupedLinear(experts, hidden_size, intermediate_size, dtype, fp8)
        self.down_proj = GroupedLinear(experts, intermediate_size, hidden_size, dtype, fp8)

    def freeze(self) -> None:
        """Make ready for decoding, see `Model.freeze`."""
        join(self.gate_proj, self.up_proj)

    def forward(self, rows: torch.Tensor, row_weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """rows [n, hidden], row_weights [n] in at least FP32, offsets int32 [experts] -> [n, hidden].

        The weight multiplies SwiGLU's output, before the down projection.
        """
        return grouped_mlp(rows, row_weights, offsets, self.gate_proj, self.up_proj, self.down_proj)


class MoE(nn.Module):
    """The parts of a mixture-of-experts layer; the block calls them in its phases."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, experts: range, fp8: GemmBackend | None = None):
        """experts: those whose weights are held; the router knows all of them."""
        super().__init__()
        self.gate = Router(config, dtype)
        self.experts = Experts(len(experts), config.hidden_size, config.moe_intermediate_size, dtype, fp8)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config.hidden_size, shared, dtype, fp8) if shared else None

    def of_few(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """The whole layer for a few tokens of a frozen model, to be compiled.

        x [B, L, hidden] in at least FP32, topk_ids and topk_weights [B·L, k] -> [B, L, hidden] of the weights' type.
        Every expert must be held here.
        """
        weights = self.experts.gate_proj.joined, self.experts.down_proj.weight
        routed = few_ffn(x.flatten(0, 1), topk_ids, topk_weights, *weights).view_as(x)
        return routed if self.shared_experts is None else routed + self.shared_experts(x.to(routed.dtype))
