"""Choosing the next token from logits."""

import torch


def distribution(logits: torch.Tensor, temperature: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
    """logits [B, vocab] -> probabilities [B, vocab] in float64.

    temperature float [B]; 0 puts everything on the largest logit (the first among equals). top_k keeps the k largest,
    then top_p the smallest set of the most probable tokens whose sum reaches top_p, always at least one.
    """
    greedy = torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    hot = temperature > 0
    if not hot.any():
        return greedy
    logits = logits.double()
    # Below the largest logit, so that no temperature, however small, makes infinities of the others' rank.
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(hot, temperature, 1.0).double().unsqueeze(-1)
    if top_k is None and top_p == 1:
        return torch.where(hot.unsqueeze(-1), scaled.softmax(dim=-1), greedy)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    if top_k is not None:
        probs[:, top_k:] = 0
        probs = probs / probs.sum(-1, keepdim=True)
    if top_p < 1:
        # A token stays if those before it have not reached top_p; the first always stays.
        dropped = probs.cumsum(-1) - probs >= top_p
        dropped[:, 0] = False
        probs = probs.masked_fill(dropped, 0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.where(hot.unsqueeze(-1), torch.zeros_like(probs).scatter_(-1, ids, probs), greedy)


def sample(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """probs [B, vocab] -> ids int64 [B], by one uniform draw each."""
    draws = torch.rand(len(probs), 1, dtype=torch.float64, generator=generator).to(probs.device)
    sums = probs.cumsum(-1)
    return torch.searchsorted(sums, draws * sums[:, -1:], right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)
