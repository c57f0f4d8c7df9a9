"""A micro-batch: the tokens of some samples, and what every depth and every layer reads off them."""

from functools import cached_property

import torch

IGNORED = -100  # the target of a position that does not count


class MicroBatch:
    """B samples of L + 1 + D tokens.

    Depth k reads tokens [k, k + L) and predicts tokens [k + 1, k + 1 + L); depth 0 is the main model. Position t
    belongs to the document of token t at every depth.

    tokens, documents: int64 [B, L + 1 + D]; documents counts from 0 in each sample, -1 is padding.
    document_mask: attention and targets stay inside a document, and positions restart with it.
    """

    def __init__(self, tokens: torch.Tensor, documents: torch.Tensor, depth: int, document_mask: bool = False):
        self.tokens, self.documents = tokens, documents
        self.depth, self.document_mask = depth, document_mask
        self.length = tokens.shape[1] - 1 - depth

    def inputs(self, k: int) -> torch.Tensor:
        """Tokens read at depth k, [B, L]."""
        return self.tokens[:, k : k + self.length]

    def targets(self, k: int) -> torch.Tensor:
        """Tokens predicted at depth k, [B, L], IGNORED where the position does not count."""
        return self.tokens[:, k + 1 : k + 1 + self.length].masked_fill(~self.valid(k), IGNORED)

    def valid(self, k: int) -> torch.Tensor:
        """Which positions count at depth k, bool [B, L]."""
        here = self.documents[:, : self.length]
        there = self.documents[:, k + 1 : k + 1 + self.length]
        valid = (here >= 0) & (there >= 0)
        return valid & (here == there) if self.document_mask else valid

    def valid_counts(self) -> torch.Tensor:
        """Number of positions that count at each depth, int64 [D + 1]."""
        return torch.stack([self.valid(k).sum() for k in range(self.depth + 1)])

    @cached_property
    def starts(self) -> torch.Tensor | None:
        """First position that each position may attend to, int64 [B, L]; None: all up to itself."""
        if not self.document_mask:
            return None
        documents = self.documents[:, : self.length]
        index = torch.arange(self.length, device=documents.device).expand_as(documents)
        opens = torch.ones_like(documents, dtype=torch.bool)
        opens[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return torch.where(opens, index, 0).cummax(dim=1).values

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position for RoPE, int64 [L], or [B, L] when they restart with each document."""
        index = torch.arange(self.length, device=self.tokens.device)
        return index if self.starts is None else index - self.starts
