"""Continuing a batch of prompts, with MTP drafts or without: one loop, in which plain decoding drafts nothing.

A round: the modules draft N tokens behind the last known one; the main model reads that one and the drafts at once; the
rejection rule keeps some of the drafts, and a token of the main model's follows them. So a round gives 1 … N + 1 tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dstrain.inference.decoder import Decoder, last_of, logits
from dstrain.inference.drafts import Drafter, verify
from dstrain.inference.sampling import distribution, sample
from dstrain.model.block import Dispatcher
from dstrain.model.model import Model


@dataclass
class Sampling:
    """How tokens are chosen, drafts too."""

    temperature: list[float]  # of each sequence; 0: greedy
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    vocab_size: int | None = None  # ids from here on are never chosen; None: all may be
    eos_id: int | None = None  # ends a sequence and is not part of it; None: nothing but the limit ends one


class Generation:
    """A batch of sequences under way: iterate over `rounds`, once."""

    def __init__(
        self,
        model: Model,
        dispatcher: Dispatcher,
        prompts: list[list[int]],
        limit: int,
        sampling: Sampling,
        drafts: int = 0,
    ):
        """prompts: ids, at least one each. limit: new tokens of a sequence, at most. drafts: N, up to the MTP depth."""
        self.model, self.limit, self.sampling, self.drafts = model, limit, sampling, drafts
        self.device = model.device
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self.temperature = torch.tensor(sampling.temperature, dtype=torch.float64, device=self.device)
        # Drafts lie beyond the limit, and so does what sequences that have ended are carried along with.
        capacity = max(map(len, prompts)) + limit + 2 * drafts + 1
        self.tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.tokens = self.tokens.to(self.device)
        self.rows = torch.arange(len(prompts), device=self.device)
        self.known = torch.tensor([len(prompt) for prompt in prompts])  # tokens of each sequence; on the host
        self.left = [limit] * len(prompts)  # how many more each may get; 0: it has ended
        self.decoder = Decoder(model, dispatcher, len(prompts), capacity)
        self.drafter = Drafter(model, dispatcher, len(prompts), capacity, drafts) if drafts else None
        self.steps = 0  # rounds of the main model behind the prompt, counted for every sequence that had not ended
        self.accepted = [0] * drafts  # at each depth, of `steps` drafts

    @torch.no_grad()
    def rounds(self) -> Iterator[list[list[int]]]:
        """The new tokens of every sequence, round by round; an empty list for one that has ended."""
        read, counts = self.tokens[:, : int(self.known.max())], self.known
        states = self.decoder.states(read)
        self.decoder.keep(counts)
        chosen, _ = self._choose(logits(self.model, last_of(states, counts)))
        new, counts = chosen.unsqueeze(1), torch.ones_like(self.known)
        while True:
            yield self._take(new, counts)
            if not any(self.left):
                return
            drafted = self.tokens.new_empty(len(self.tokens), 0)
            if self.drafter is not None:
                drafted, chances = self.drafter.draft(self.tokens, self.known, states, self._choose)
            last = self.tokens[self.rows, (self.known - 1).to(self.device)]
            states = self.decoder.states(torch.cat((last.unsqueeze(1), drafted), dim=1))
            wanted = self._distributions(logits(self.model, states))
            accepted = torch.zeros_like(self.rows)
            rest = wanted[:, 0]
            if self.drafter is not None:
                draw = torch.rand(drafted.shape, dtype=torch.float64, generator=self.generator).to(self.device)
                accepted, rest = verify(drafted, chances, wanted, draw)
            new = torch.cat((drafted, last.unsqueeze(1)), dim=1)
            new[self.rows, accepted] = sample(rest, self.generator)
            counts = torch.where(torch.tensor(self.left) > 0, accepted.cpu() + 1, 0)
            self._count(counts.tolist())
            self.decoder.keep(counts)

    def _take(self, new, counts):
        """Write new tokens [B, m], of which the first `counts` [B] count. -> those of each sequence that are text."""
        index = self.known.unsqueeze(-1) + torch.arange(new.shape[1])
        self.tokens[self.rows.unsqueeze(-1), index.to(self.device)] = new
        fresh = []
        for row, (ids, count) in enumerate(zip(new.tolist(), counts.tolist())):
            ids = ids[: min(count, self.left[row])]
            if self.sampling.eos_id in ids:
                ids, self.left[row] = ids[: ids.index(self.sampling.eos_id)], 0
            self.left[row] -= min(len(ids), self.left[row])
            fresh.append(ids)
        self.known = self.known + counts
        return fresh

    def _count(self, counts):
        self.steps += sum(count > 0 for count in counts)
        for depth in range(self.drafts):
            self.accepted[depth] += sum(count > depth + 1 for count in counts)

    def _choose(self, logits):
        """logits [B, vocab] -> ids int64 [B], and the distributions that they were drawn from."""
        probs = self._distributions(logits.unsqueeze(1))[:, 0]
        return sample(probs, self.generator), probs

    def _distributions(self, logits):
        """logits [B, n, vocab] -> float64 [B, n, vocab]."""
        logits[..., self.sampling.vocab_size or logits.shape[-1] :] = -torch.inf
        temperature = self.temperature.repeat_interleave(logits.shape[1])
        probs = distribution(logits.flatten(0, 1), temperature, self.sampling.top_p, self.sampling.top_k)
        return probs.view(logits.shape)
