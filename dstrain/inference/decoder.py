"""Decoding with a latent cache: the block's own four phases, a few new tokens of every sequence at a time."""

import torch

from dstrain.model.attention import AttentionContext, LatentCache
from dstrain.model.block import BlockPass, Dispatcher
from dstrain.model.model import Model
from dstrain.model.rope import Rotary

PREFILL_TOKENS = 512  # new tokens at once: bounds the attention scores of a long prompt


class Decoder:
    """The cached state of a batch of sequences, which may have different lengths."""

    def __init__(self, model: Model, dispatcher: Dispatcher, sequences: int, capacity: int):
        """capacity: tokens that a sequence may have in all; memory is taken for them at once."""
        self.model, self.dispatcher, self.capacity = model, dispatcher, capacity
        make = (model.config, sequences, capacity, model.dtype, model.device)
        self.caches = [LatentCache(*make) for _ in model.blocks]
        self.lengths = torch.zeros(sequences, dtype=torch.int64, device=model.device)

    @torch.no_grad()
    def advance(self, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Take new tokens in. -> logits behind each sequence's last new token, at least FP32 [B, vocab].

        tokens int64 [B, n]; counts int64 [B]: how many of the n are real (they come first), None: all. A sequence
        with count 0 keeps its length and its logits mean nothing.
        """
        counts = torch.full_like(self.lengths, tokens.shape[1]) if counts is None else counts
        state = torch.zeros(len(tokens), self.model.config.hidden_size, dtype=self.model.dtype, device=tokens.device)
        for first in range(0, tokens.shape[1], PREFILL_TOKENS):
            part = tokens[:, first : first + PREFILL_TOKENS]
            real = (counts - first).clamp(0, part.shape[1])
            hidden = self._run(part)
            ends_here = (counts > first) & (counts <= first + part.shape[1])
            last = hidden[torch.arange(len(part), device=part.device), (real - 1).clamp_min(0)]
            state = torch.where(ends_here.unsqueeze(-1), last, state)
            self.lengths = self.lengths + real
        return self.model.lm_head(self.model.model.norm(state)).to(
            torch.promote_types(self.model.dtype, torch.float32)
        )

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, n] -> hidden states [B, n, hidden]; what padding leaves in the cache is overwritten later."""
        positions = self.lengths.unsqueeze(-1) + torch.arange(tokens.shape[1], device=tokens.device)
        if int(positions[:, -1].max()) >= self.capacity:
            raise ValueError(f"{int(positions.max()) + 1} tokens do not fit into a cache of {self.capacity}")
        context = AttentionContext(Rotary(self.model.config, positions, self.model.dtype), lengths=self.lengths)
        hidden = self.model.model.embed_tokens(tokens)
        for block, cache in zip(self.model.blocks, self.caches):
            phases = BlockPass(block, context, self.dispatcher, train=False, cache=cache)
            phases.attention(hidden)
            phases.dispatch()
            phases.experts()
            phases.combine()
            hidden = phases.output()
        return hidden
