"""Token dispatchers: how rows travel from tokens to experts and back. Here the local one: a permutation."""

import torch


class LocalDispatcher:
    """Every expert is on this rank."""

    def route(self, topk_ids: torch.Tensor, experts: int) -> "LocalDispatch":
        return LocalDispatch(topk_ids, experts)


class LocalDispatch:
    """Rows sorted by expert, within an expert by token. Sums are gathers, so their order is fixed everywhere."""

    def __init__(self, topk_ids: torch.Tensor, experts: int):
        """topk_ids int64 [T, k]."""
        self.shape = topk_ids.shape
        flat = topk_ids.flatten()
        self.order = flat.argsort(stable=True)  # row -> slot (token · k + choice)
        self.tokens = self.order // self.shape[1]  # row -> token
        self.inverse = torch.empty_like(self.order)  # slot -> row
        self.inverse[self.order] = torch.arange(len(flat), device=flat.device)
        counts = torch.bincount(flat, minlength=experts)
        self.offsets = counts.cumsum(0).to(torch.int32)

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[self.tokens], topk_weights.flatten()[self.order]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.inverse].unflatten(0, self.shape).sum(dim=1)

    def combine_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return grad[self.tokens]

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.combine(grad_rows), grad_row_weights[self.inverse].view(self.shape)
