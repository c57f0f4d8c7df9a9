"""A process group of any size in one process: nothing travels, everything is written down.

Tensors without data are received as they are. Of tensors with data every rank is taken to say what this one says,
which is enough for what ranks tell each other while they connect.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dstrain.parallel.dispatch_traffic import link_between
from dstrain.planner.rehearsal.ledger import Ledger
from dstrain.precision.stand_in import kind

BACKEND = "rehearsal"


@dataclass
class Messages:
    """What one rank sends. experts: token dispatch; pipeline: hidden states and their gradients; gradients and weights:
    of ZeRO-1; totals: counts, losses, norms and loads.

    shapes: (what, shape of what is sent, type) -> how often. bytes: (what, slow | fast) -> sent.
    order: for (ranks of a group, whether for totals), which have groups of their own, what all these ranks must do in
    the same order; sent, received: by (source, target).
    """

    shapes: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)
    order: dict[tuple[tuple[int, ...], bool], list] = field(default_factory=dict)
    sent: dict[tuple[int, int], list] = field(default_factory=dict)
    received: dict[tuple[int, int], list] = field(default_factory=dict)


class Notes:
    """What the groups of the rank that is rehearsed write to."""

    def __init__(self, rank: int, ranks_per_node: int, ledger: Ledger):
        self.rank, self.ranks_per_node, self.ledger, self.messages = rank, ranks_per_node, ledger, Messages()
        self.connecting = True  # while it is, nothing counts

    def collective(self, what: str, ranks: tuple[int, ...], tensor: torch.Tensor, factor: float) -> None:
        """factor: of the tensor's bytes, what a rank sends in a ring."""
        if self.connecting:
            return
        self.shape(what, tensor)
        nodes = {rank // self.ranks_per_node for rank in ranks}
        self.messages.bytes[what, "slow" if len(nodes) > 1 else "fast"] += tensor.nbytes * factor
        self.messages.order.setdefault((ranks, what == "totals"), []).append((what, *_form(tensor)))

    def shape(self, what: str, tensor: torch.Tensor) -> None:
        if not self.connecting:
            self.messages.shapes[what, tuple(tensor.shape), tensor.dtype] += 1

    def sends(self, what: str, target: int, size: int) -> None:
        link = link_between(self.rank, target, self.ranks_per_node)
        if link != "none" and not self.connecting:
            self.messages.bytes[what, link] += size


class Finished(dist.Work):
    """Over by the second time that somebody asks: a message is on its way for a while.

    held: what the communication reads and writes, kept as gloo keeps it, as long as this object; NCCL's lets go of it
    as soon as the stream waits.
    """

    def __init__(self, *held: torch.Tensor, at_end: Callable[[], None] = lambda: None):
        super().__init__()
        self.asked, self.held, self.at_end = False, held, at_end

    def is_completed(self) -> bool:
        over, self.asked = self.asked, True
        return over

    def wait(self, timeout=None) -> bool:
        self.at_end()
        if kind(torch.device("meta")) == "cuda":
            self.held = ()
        return True


class RehearsalGroup(dist.ProcessGroup):
    notes: Notes  # of the rank that is rehearsed; a world has one

    def __init__(self, rank: int, ranks: Sequence[int]):
        super().__init__(rank, len(ranks))
        self.ranks = tuple(ranks)

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors, opts=None):
        (tensor,) = tensors
        n = len(self.ranks)
        self.notes.collective("totals", self.ranks, tensor, 2 * (n - 1) / n)
        return Finished()

    def reduce_scatter_single(self, output, input, opts=None):
        n = len(self.ranks)
        self.notes.collective("gradients", self.ranks, input, (n - 1) / n)
        return Finished()

    def all_gather_single(self, output, input, opts=None):
        n = len(self.ranks)
        if not output.is_meta:
            output.view(n, -1).copy_(input.clone().view(1, -1))
        what = "weights" if self.notes.ledger.kind(output) == "weights" else "totals"
        self.notes.collective(what, self.ranks, output, (n - 1) / n)
        return Finished()

    def allgather(self, outputs, inputs, opts=None):
        for output in outputs[0]:
            output.copy_(inputs[0])
        return Finished()

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None):
        if sum(output_splits) != len(output) or sum(input_splits) != len(input):
            raise ValueError(f"all-to-all of {len(input)} rows to {len(output)} with splits of other sums")
        self.notes.ledger.count_as("buffers", output, input)
        self.notes.shape("experts", input)
        for target, rows in zip(self.ranks, input_splits, strict=True):
            self.notes.sends("experts", target, rows * input[0:1].nbytes)
        return Finished(output, input)

    def send(self, tensors, target, tag=0):
        (tensor,), notes, target = tensors, self.notes, self.ranks[target]
        notes.ledger.count_as("buffers", tensor)
        notes.shape("pipeline", tensor)
        notes.sends("pipeline", target, tensor.nbytes)
        notes.messages.sent.setdefault((notes.rank, target), []).append(_form(tensor))
        return Finished(tensor)

    def recv(self, tensors, source, tag=0):
        (tensor,), notes, source = tensors, self.notes, self.ranks[source]
        notes.ledger.count_as("buffers", tensor)
        notes.messages.received.setdefault((source, notes.rank), []).append(_form(tensor))
        return Finished(tensor, at_end=lambda: notes.ledger.count_as("activations", tensor))

    # The names of these before PyTorch 2.13.
    _reduce_scatter_base, _allgather_base, alltoall_base = reduce_scatter_single, all_gather_single, all_to_all_single


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


@contextmanager
def fake_world(rank: int, size: int, notes: Notes) -> Iterator[None]:
    """Inside, torch.distributed is initialised as rank `rank` of `size`, with groups that write to `notes`."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            BACKEND, lambda options, _: RehearsalGroup(
                options.group_rank, options.global_ranks_in_group or range(options.group_size)  # of the world: empty
            ), extended_api=True, devices=["cpu", "meta"],
        )
    RehearsalGroup.notes = notes
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
