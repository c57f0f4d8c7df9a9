"""Drafts by the MTP modules (arXiv 2412.19437 §2.2, "MTP in inference").

Tokens x_0 … x_{p+1} are known and the main model has seen x_0 … x_p. Module k at position i reads the state of depth
k - 1 there and embed(x_{i+k}), and predicts x_{i+k+1}. So at position p the modules draft one after the other:

    module 1 reads x_{p+1}, drafts x_{p+2};   module 2 reads that draft, drafts x_{p+3};   …

Each module has a cache of its own over all positions. Entries that were made with drafts are made again, once the tokens
are known: every round the N modules run on the positions from p' + 2 - N on, where p' is the p of the round before, and
module 1 therefore needs the main model's states of the last N - 1 positions again.
"""

from collections.abc import Callable

import torch

from dstrain.inference.decoder import CachedBlocks, few_of, last_of, logits
from dstrain.model.block import Dispatcher
from dstrain.model.model import Model

Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Drafter:
    """The first N MTP modules of a model beside a `Decoder` of the same sequences."""

    def __init__(self, model: Model, dispatcher: Dispatcher, sequences: int, capacity: int, drafts: int):
        """capacity: tokens that a sequence may have in all. drafts: N, from 1 to the model's MTP depth."""
        self.model, self.drafts = model, drafts
        modules = [model.mtp_module(depth) for depth in range(1, drafts + 1)]
        self.stacks = [CachedBlocks(model, [module], dispatcher, sequences, capacity) for module in modules]
        self.done = torch.zeros(sequences, dtype=torch.int64)  # positions whose tokens up to x_{i+1} were all known
        # The main model's states of the N - 1 positions before `done`; zeros before the sequence begins.
        hidden = model.config.hidden_size
        self.states = torch.zeros(sequences, drafts - 1, hidden, dtype=model.dtype, device=model.device)

    @torch.no_grad()
    def draft(
        self, tokens: torch.Tensor, known: torch.Tensor, states: torch.Tensor, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> N drafts of each sequence int64 [B, N], and the distributions [B, N, vocab] that they were drawn from.

        tokens int64 [B, capacity], known int64 [B] on the host: the sequences and their lengths, at least 2, and more
        than last time unless a sequence has ended. states [B, n, hidden]: the main model's, of the positions since
        last time; those of the first known - 1 - done positions count. choose: logits [B, vocab] -> ids, distributions.
        """
        device, before = tokens.device, self.drafts - 1
        base, first, end = self.done - before, (self.done - before).clamp_min(0), known - 1
        states = torch.cat((self.states, states), dim=1)  # of the positions from `base` on
        counts = end - first
        index = first.unsqueeze(-1) + torch.arange(int(counts.max()))
        index = torch.minimum(index, end.unsqueeze(-1) - 1)
        state = _take(states, (index - base.unsqueeze(-1)).to(device))
        last = end.unsqueeze(-1) - before + torch.arange(before)
        self.states = _take(states, (last - base.unsqueeze(-1)).to(device))
        self.done = end

        read = tokens.gather(1, (index + 1).to(device))
        place = torch.arange(len(tokens), device=device), (counts - 1).to(device)
        drafted, chances = [], []
        for stack in self.stacks:
            module = stack.blocks[0]
            if drafted:  # one token further on
                read = torch.cat((read[:, 1:], read[:, -1:]), dim=1)
                read[place] = drafted[-1]
            few = few_of(self.model, state)
            merge = module.merge if few is None else few.merges[module.layer]
            hidden = stack.run(merge(self.model.model.embed_tokens(read), state), first)
            state = module.shared_head.norm(hidden)
            ids, probs = choose(logits(self.model, last_of(state, counts)))
            drafted.append(ids)
            chances.append(probs)
        return torch.stack(drafted, dim=1), torch.stack(chances, dim=1)


def verify(
    drafted: torch.Tensor, drafts: torch.Tensor, wanted: torch.Tensor, draw: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rejection rule (arXiv 2211.17192 §2.3): what comes out is distributed as if it were drawn from `wanted`.

    drafted int64 [B, N], drawn from drafts [B, N, vocab]; wanted [B, N + 1, vocab], the distributions behind none, one, …
    all of them; draw [B, N] uniform from [0, 1). A draft d is accepted with chance min(1, wanted(d) / drafts(d)), up to
    the first that is not. -> how many are accepted, int64 [B], and the distribution [B, vocab] of the token behind them:
    (wanted - drafts)⁺, not normalised, in place of a rejected draft, and wanted after the last.
    """
    index = drafted.unsqueeze(-1)
    chance = wanted[:, :-1].gather(-1, index).squeeze(-1)
    accepted = (draw * drafts.gather(-1, index).squeeze(-1) < chance).long().cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(drafted), device=drafted.device)
    there = wanted[rows, accepted]
    drafts = torch.cat((drafts, torch.zeros_like(drafts[:, :1])), dim=1)  # no draft is behind the last
    rest = (there - drafts[rows, accepted]).clamp_min(0)
    # Nothing is left only where the two are equal but for rounding.
    return accepted, torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, there)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [B, n, hidden], index int64 [B, m] -> [B, m, hidden]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(-1), index]
