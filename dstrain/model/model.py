"""The model as a list of units: embed, block 0 … n-1, head, and D times (MTP block + head).

Parameter names are Hugging Face's; MTP module k (from 1) is layer num_hidden_layers + k - 1, without copies of
embedding and head. Units and their passes are in `units.py`.
"""

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.block import Block
from dstrain.model.mtp import MTPModule
from dstrain.model.router import Router
from dstrain.precision.linear import Embedding, Linear
from dstrain.precision.pointwise import RMSNorm


class Body(nn.Module):
    """Embedding, blocks (MTP blocks last) and the final norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        layers = config.num_hidden_layers
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList(Block(config, layer, dtype) for layer in range(layers))
        self.layers.extend(MTPModule(config, layers + k, dtype) for k in range(config.num_nextn_predict_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)


class Model(nn.Module):
    """A DeepSeek-V3-style model. Matrices are of `dtype`; norms, the gate and the routing bias at least FP32."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Body(config, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def blocks(self) -> list[Block]:
        """The main model's blocks."""
        return list(self.model.layers[: self.config.num_hidden_layers])

    @property
    def mtp_modules(self) -> list[MTPModule]:
        return list(self.model.layers[self.config.num_hidden_layers :])

    @property
    def routers(self) -> list[Router]:
        """One per MoE layer, MTP blocks last."""
        return [layer.mlp.gate for layer in self.model.layers if layer.is_moe]

    def head_norm(self, depth: int) -> RMSNorm:
        """The norm in front of the projection at depth 0 (main) … D."""
        return self.model.norm if depth == 0 else self.mtp_modules[depth - 1].shared_head.norm
