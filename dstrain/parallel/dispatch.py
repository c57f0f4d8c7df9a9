"""Token dispatchers: how rows travel from tokens to experts and back. Here the local one: a permutation."""

import torch

from dstrain.parallel.dispatch_layout import Copies, ExpertRows, count
from dstrain.precision.on_device import sum_rows
from dstrain.precision.stand_in import kind


def row_alignment(device: torch.device, dtype: torch.dtype) -> int:
    """To what multiple an expert's rows are best filled up for training.

    On the CPU a BF16 product is compiled for its exact shape. Loads change at every step, so without rounding each step
    would compile hundreds of new products and keep their code.
    """
    return 32 if kind(device) == "cpu" and dtype == torch.bfloat16 else 1


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
        return LocalDispatch(topk_ids, experts, self)

    def host_total(self, room: torch.Tensor) -> int:
        """room int64 [experts] -> its sum. Where the host waits for the device: a rehearsal states its loads here."""
        return int(room.sum())


class LocalDispatch:
    """Rows sorted by expert, within an expert by token. Sums are gathers, so their order is fixed everywhere.

    Rows that only fill up carry the first token with weight 0: the weight multiplies what goes into the down
    projection, so they add zeros to every weight gradient, and no token reads them back. A choice of -1 has such a row
    too, behind the last expert's, so that the number of rows needs no look at the ids; its output and its gradient are
    zeros.
    """

    def __init__(self, topk_ids: torch.Tensor, experts: int, dispatcher: LocalDispatcher):
        """topk_ids int64 [T, k], -1 for no expert."""
        self.dropped = topk_ids < 0
        if dispatcher.alignment == 1:
            self._without_filling(topk_ids, experts)
        else:
            self._filled(topk_ids, experts, dispatcher)

    def _without_filling(self, topk_ids, experts):
        """Rows are slots, sorted. In few operations: decoding has a few tokens, and is as fast as these are few."""
        slots = topk_ids.numel()
        device = topk_ids.device
        keys, order = topk_ids.masked_fill(self.dropped, experts).flatten().sort(stable=True)
        self.offsets = torch.searchsorted(keys, torch.arange(1, experts + 1, device=device), out_int32=True)
        self.offsets[-1] = slots
        self.token_of_row = order // topk_ids.shape[1]
        self.row_of_slot = torch.empty_like(order).scatter_(0, order, torch.arange(slots, device=device))
        self.row_of_slot = self.row_of_slot.view(topk_ids.shape)

    def _filled(self, topk_ids, experts, dispatcher):
        alignment = dispatcher.alignment
        slots = topk_ids.numel()
        copies = Copies(topk_ids, experts, slots)
        counts = count(topk_ids, experts)
        counts[-1] += slots - counts.sum()
        room = (counts + alignment - 1) // alignment * alignment
        total = dispatcher.host_total(room)
        rows = ExpertRows(counts.view(1, experts, 1), slots, total, alignment)
        self.offsets = rows.offsets
        self.row_of_slot = rows.row_of_copy[copies.place]  # [T, k]
        self.token_of_row = torch.zeros(total, dtype=torch.int64, device=topk_ids.device)
        self.token_of_row[rows.row_of_copy] = copies.token

    def ready(self) -> bool:
        return True

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor) -> Done:
        row_weights = topk_weights.new_zeros(len(self.token_of_row))
        row_weights[self.row_of_slot] = topk_weights.masked_fill(self.dropped, 0)
        return Done((x.index_select(0, self.token_of_row), row_weights))

    def combine(self, rows: torch.Tensor) -> Done:
        return Done(sum_rows(rows, self.row_of_slot))

    def combine_backward(self, grad: torch.Tensor) -> Done:
        return Done(grad.index_select(0, self.token_of_row))

    def dispatch_backward(self, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor) -> Done:
        grad_topk_weights = grad_row_weights[self.row_of_slot].masked_fill(self.dropped, 0)
        return Done((sum_rows(grad_rows, self.row_of_slot), grad_topk_weights))
