"""Where rows of tokens stand: in the order in which they are sent, among the rows of experts, and back at their tokens.

A *copy* is one token on its way to one target. A *slot* is one choice of one token: token · choices + choice. Nothing
here reads a number from the device: sizes come in as integers, and tables are tensors of a size known before.
Targets and experts below 0 mean none.
"""

import torch

from dstrain.precision.on_device import sum_rows


def count(ids: torch.Tensor, targets: int) -> torch.Tensor:
    """ids int64 of any shape -> int64 [targets], how often each occurs, without asking the device for a size."""
    key = torch.where(ids < 0, targets, ids).flatten()
    return key.new_zeros(targets + 1).scatter_add_(0, key, torch.ones_like(key))[:targets]


class Copies:
    """The copies of T tokens in the order in which they are sent: by target, then by token, then by choice.

    slot, token: int64 [n], of each copy. place: int64 [T, choices], the copy of each slot, n where there is none:
    whoever brings copies back puts a row of zeros behind them.
    """

    def __init__(self, ids: torch.Tensor, targets: int, n: int):
        """ids int64 [T, choices] below targets. n: copies to be sent; if there are fewer, slots of none follow."""
        flat = ids.flatten()
        self.slot = torch.where(flat < 0, targets, flat).argsort(stable=True)[:n]
        self.token = self.slot // ids.shape[1]
        self.place = torch.full_like(flat, n)
        self.place[self.slot] = torch.arange(n, device=ids.device)
        self.place = self.place.view(ids.shape)

    def sum(self, copies: torch.Tensor) -> torch.Tensor:
        """copies [n + 1, hidden], the last one zeros -> the sum of each token's, [T, hidden]."""
        return sum_rows(copies, self.place)

    def of_slots(self, values: torch.Tensor) -> torch.Tensor:
        """values [n + 1, 1], the last one zero -> [T, choices]."""
        return values[self.place, 0]


class ExpertRows:
    """The rows of one rank's experts: sorted by expert, each expert's filled up to a multiple of `alignment`.

    offsets: int32 [experts], where each expert's rows end. row_of_copy: int64 [n]. copy_of_row: int64 [total], n for a
    row that only fills up.
    """

    def __init__(self, counts: torch.Tensor, n: int, total: int, alignment: int):
        """counts int64 [senders, experts, origins]: copies received, in the order in which they come. n: their sum.

        Rows of one expert are ordered by origin, then sender. total: rows in all (`filled`).
        """
        room = (counts.sum(dim=(0, 2)) + alignment - 1) // alignment * alignment
        ends = room.cumsum(0)
        self.offsets = ends.to(torch.int32)
        wanted = counts.permute(1, 2, 0).flatten(1)  # [experts, origins · senders]
        first = (ends - room).unsqueeze(1) + wanted.cumsum(1) - wanted  # the first row of each run of copies
        first = first.view(counts.shape[1], counts.shape[2], counts.shape[0]).permute(2, 0, 1).flatten()
        runs = counts.flatten()
        shift = first - (runs.cumsum(0) - runs)
        copies = torch.arange(n, device=counts.device)
        self.row_of_copy = copies + shift.repeat_interleave(runs, output_size=n)
        self.copy_of_row = torch.full((total,), n, device=counts.device)
        self.copy_of_row[self.row_of_copy] = copies


def filled(counts: list[int], alignment: int) -> int:
    """Rows in all for experts that receive `counts` copies each."""
    return sum(-(-received // alignment) * alignment for received in counts)
