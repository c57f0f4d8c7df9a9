"""The model as a list of units: embed, block 0 … n-1, head, and D times (MTP block + head); or a rank's share of it.

Parameter names are Hugging Face's; MTP module k (from 1) is layer num_hidden_layers + k - 1, without copies of
embedding and head. Units are in `unit.py`, their passes in `passes.py`.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.attention import Attention
from dstrain.model.block import Block
from dstrain.model.experts import MLP, Experts
from dstrain.model.mtp import MTPModule
from dstrain.model.router import Router
from dstrain.model.share import Share
from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.linear import Embedding, Linear
from dstrain.precision.pointwise import RMSNorm
from dstrain.precision.policy import at_least_fp32


class Body(nn.Module):
    """Embedding, blocks (MTP blocks last) and the final norm."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, share: Share, fp8: GemmBackend | None):
        super().__init__()
        if share.embedding:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        # A dictionary, whose keys are the layers' numbers: parameter names are global on a rank that holds a few.
        self.layers = nn.ModuleDict()
        for layer in sorted(share.layers):
            kind = Block if layer < config.num_hidden_layers else MTPModule
            self.layers[str(layer)] = kind(config, layer, dtype, share.experts, fp8)
        if 0 in share.norms:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)


class Few:
    """A frozen model's parts as functions of a few tokens."""

    def __init__(self, model: "Model", compile: Callable[[Callable], Callable]):
        """compile: what becomes of each function."""
        self.blocks = {block.layer: compile(block.few) for block in model.layers}
        self.merges = {module.layer: compile(module.merge) for module in model.mtp_modules}
        self.logits = compile(model.logits)


class Model(nn.Module):
    """A DeepSeek-V3-style model. Matrices are of `dtype`; norms, the gate and the routing bias at least FP32."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, share: Share | None = None, fp8: GemmBackend | None = None
    ):
        """share: what to hold; None: all. fp8: what multiplies in every Linear of attention and FFN, experts included, but
        not in embedding, gate, eh_proj and head; None: they are of `dtype`."""
        super().__init__()
        self.config, self.dtype = config, dtype
        self.few: Few | None = None  # see `freeze`
        self.share = share or Share.whole(config)
        self.model = Body(config, dtype, self.share, fp8)
        if self.share.head:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def freeze(self, compiled: bool = False) -> "Model":
        """Make ready for decoding: the weights will not change any more, and need no gradients.

        Those that share an input become slices of one matrix, and attention's absorbed ones are laid out once.
        compiled: blocks of a few tokens run fused by torch.compile; for a model that holds every expert, not in FP8.
        """
        self.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, Attention | MLP | Experts):
                module.freeze()
        if compiled:
            # A program for each kind of block, type and size 0, 1 or more of batch and tokens; the default of 8 is too few.
            torch._dynamo.config.recompile_limit = 64
            self.few = Few(self, functools.partial(torch.compile, dynamic=True))
        return self

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """states [..., hidden], normalised, of any depth -> [..., vocab] in at least FP32; not for training."""
        return at_least_fp32(self.lm_head(states))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def layer(self, number: int) -> Block:
        """A block by its number in the whole model's `layers`."""
        return self.model.layers[str(number)]

    @property
    def layers(self) -> list[Block]:
        """Every block that is held, MTP blocks last; a block knows its number, `layer`."""
        return list(self.model.layers.values())

    @property
    def blocks(self) -> list[Block]:
        """The main model's blocks that are held."""
        return [layer for layer in self.layers if layer.layer < self.config.num_hidden_layers]

    @property
    def mtp_modules(self) -> list[MTPModule]:
        return [layer for layer in self.layers if layer.layer >= self.config.num_hidden_layers]

    def mtp_module(self, depth: int) -> MTPModule:
        """Module k of 1 … D."""
        return self.layer(self.config.num_hidden_layers + depth - 1)

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the MoE layers that are held, MTP blocks last."""
        return [layer.layer for layer in self.layers if layer.is_moe]

    @property
    def routers(self) -> list[Router]:
        """One per layer of `moe_layers`."""
        return [self.layer(number).mlp.gate for number in self.moe_layers]

    def head_norm(self, depth: int) -> RMSNorm:
        """The norm in front of the projection at depth 0 (main) … D."""
        return self.model.norm if depth == 0 else self.mtp_module(depth).shared_head.norm
