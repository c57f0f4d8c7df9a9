"""Decoding with a latent cache: the block's own four phases, a few new tokens of every sequence at a time."""

import torch

from dstrain.model.attention import AttentionContext, LatentCache, Places
from dstrain.model.block import Block, BlockPass, Dispatcher
from dstrain.model.model import Few, Model
from dstrain.model.rope import Rotary
from dstrain.precision.few import FEW_TOKENS

PREFILL_TOKENS = 512  # new tokens at once: bounds the attention scores of a long prompt


class CachedBlocks:
    """Some blocks with a cache each, for a batch of sequences."""

    def __init__(self, model: Model, blocks: list[Block], dispatcher: Dispatcher, sequences: int, capacity: int):
        """capacity: tokens that a sequence may have in all."""
        self.model, self.blocks, self.dispatcher, self.capacity = model, blocks, dispatcher, capacity
        self.caches = [LatentCache(model.config, sequences, model.dtype, model.device) for _ in blocks]
        self.rotary = Rotary(model.config, torch.arange(capacity, device=model.device), model.dtype)

    def run(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """hidden [B, n, hidden] of new tokens behind the first `lengths` -> what the last block gives, the same shape.

        lengths int64 [B], on the host. Entries behind them are overwritten: whoever wants to forget the last tokens,
        or has filled up the shorter sequences, calls with smaller lengths next.
        """
        parts = [self._run(part, lengths + i * PREFILL_TOKENS) for i, part in enumerate(hidden.split(PREFILL_TOKENS, 1))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _run(self, hidden, lengths):
        places = Places(lengths, hidden.shape[1], hidden.device)
        if places.keys > self.capacity:
            raise ValueError(f"{places.keys} tokens do not fit into a cache of {self.capacity}")
        context = AttentionContext(self.rotary.at(places.index), places=places)
        few = few_of(self.model, hidden)
        for block, cache in zip(self.blocks, self.caches):
            cache.make_room(places)
            if few is not None:
                hidden = few.blocks[block.layer](hidden, context, cache)
                continue
            phases = BlockPass(block, context, self.dispatcher, train=False, cache=cache)
            phases.attention(hidden)
            phases.dispatch()
            phases.experts()
            phases.combine()
            hidden = phases.output()
        return hidden


class Decoder:
    """The main model's cached state of a batch of sequences, which may have different lengths."""

    def __init__(self, model: Model, dispatcher: Dispatcher, sequences: int, capacity: int):
        """capacity: tokens that a sequence may have in all."""
        self.model = model
        self.stack = CachedBlocks(model, model.blocks, dispatcher, sequences, capacity)
        self.lengths = torch.zeros(sequences, dtype=torch.int64)  # tokens of each sequence in the caches; on the host

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [B, n], new ones -> their normalised states [B, n, hidden]; `keep` says how many count."""
        hidden = self.stack.run(self.model.model.embed_tokens(tokens), self.lengths)
        return self.model.model.norm(hidden)

    def keep(self, counts: torch.Tensor) -> None:
        """counts int64 [B], on the host: how many of the tokens that came last stay; they come first."""
        self.lengths = self.lengths + counts

    def advance(self, tokens: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Take new tokens in. -> logits behind each sequence's last new token, at least FP32 [B, vocab].

        tokens int64 [B, n]; counts int64 [B]: how many of the n are real (they come first), None: all. A sequence
        with count 0 keeps its length and its logits mean nothing.
        """
        states = self.states(tokens)
        counts = torch.full_like(self.lengths, tokens.shape[1]) if counts is None else counts.cpu()
        self.keep(counts)
        return logits(self.model, last_of(states, counts))


def last_of(states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """states [B, n, ·], counts int64 [B] on the host -> of each sequence the last that counts, [B, ·]."""
    return states[torch.arange(len(states)), (counts - 1).clamp_min(0)]


@torch.no_grad()
def logits(model: Model, states: torch.Tensor) -> torch.Tensor:
    """states [..., hidden], normalised, of any depth -> [..., vocab] in at least FP32."""
    few = few_of(model, states)
    return model.logits(states) if few is None else few.logits(states)


def few_of(model: Model, x: torch.Tensor) -> Few | None:
    """What computes x [..., ·] of so few tokens in a model that was compiled for them."""
    return model.few if x.shape[:-1].numel() <= FEW_TOKENS else None
