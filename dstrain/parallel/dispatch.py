"""Token dispatchers: how rows travel from tokens to experts and back. Here the local one: a permutation."""

import torch


def row_alignment(device: torch.device, dtype: torch.dtype) -> int:
    """To what multiple an expert's rows are best filled up for training.

    On the CPU a BF16 product is compiled for its exact shape. Loads change at every step, so without rounding each step
    would compile hundreds of new products and keep their code.
    """
    return 32 if device.type == "cpu" and dtype == torch.bfloat16 else 1


class Done:
    """A communication that needed none: its result is there already."""

    def __init__(self, result):
        self.result = result

    def wait(self):
        return self.result


class LocalDispatcher:
    """Every expert is on this rank. alignment: an expert that has rows gets a multiple of this many."""

    def __init__(self, alignment: int = 1):
        self.alignment = alignment

    def route(self, topk_ids: torch.Tensor, experts: int) -> "LocalDispatch":
        return LocalDispatch(topk_ids, experts, self.alignment)


class LocalDispatch:
    """Rows sorted by expert, within an expert by token. Sums are gathers, so their order is fixed everywhere.

    Rows that only fill up carry the first token with weight 0: the weight multiplies what goes into the down projection,
    so they add zeros to every weight gradient, and no token reads them back.
    """

    def __init__(self, topk_ids: torch.Tensor, experts: int, alignment: int):
        """topk_ids int64 [T, k]."""
        self.shape = topk_ids.shape
        flat = topk_ids.flatten()
        order = flat.argsort(stable=True)  # sorted place -> slot (token · k + choice)
        counts = torch.bincount(flat, minlength=experts)
        room = (counts + alignment - 1) // alignment * alignment
        self.offsets = room.cumsum(0).to(torch.int32)
        gaps = (room - counts).cumsum(0) - (room - counts)  # filling rows in front of each expert
        rows = torch.arange(len(flat), device=flat.device) + gaps[flat[order]]  # sorted place -> row
        total = len(flat) if alignment == 1 else int(self.offsets[-1])
        self.row_of_slot = torch.empty_like(order)
        self.row_of_slot[order] = rows
        self.token_of_row = torch.zeros(total, dtype=torch.int64, device=flat.device)
        self.token_of_row[rows] = order // self.shape[1]

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor) -> Done:
        row_weights = topk_weights.new_zeros(len(self.token_of_row))
        row_weights[self.row_of_slot] = topk_weights.flatten()
        return Done((x[self.token_of_row], row_weights))

    def combine(self, rows: torch.Tensor) -> Done:
        return Done(self._sum(rows))

    def combine_backward(self, grad: torch.Tensor) -> Done:
        return Done(grad[self.token_of_row])

    def dispatch_backward(self, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor) -> Done:
        return Done((self._sum(grad_rows), grad_row_weights[self.row_of_slot].view(self.shape)))

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.row_of_slot].unflatten(0, self.shape).sum(dim=1)
