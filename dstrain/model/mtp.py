"""Heads and multi-token-prediction modules (arXiv 2412.19437 §2.2).

    module k:  h' = W_eh [norm_e(embed(t_{i+k})) ; norm_h(s_{k-1})],   h_k = Block(h'),   s_k = norm(h_k),   p = head(s_k)

A head is its norm and the projection, and passes its *normalised* state s on: s_0 follows the final norm.
The embedding and the projection are the main model's own tensors.
"""

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.block import Block
from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.linear import Linear
from dstrain.precision.pointwise import RMSNorm


class SharedHead(nn.Module):
    """What a depth's head owns of its own: the norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)


class MTPModule(Block):
    """A block behind the projection of [embedding ; state], and in front of a norm."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, experts: range, fp8: GemmBackend | None = None):
        super().__init__(config, layer, dtype, experts, fp8)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, dtype)
        self.shared_head = SharedHead(config, dtype)

    def merge(self, embedded: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """embedded, state [B, L, hidden] -> the block's input; the embedding comes first, as in released weights."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(state)), dim=-1))
