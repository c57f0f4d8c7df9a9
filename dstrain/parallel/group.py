"""A set of ranks that communicate, and the collectives that the rest of the code is made of.

The same calls run on gloo (CPU tensors) and on NCCL (CUDA tensors): PyTorch 2.13 has each of them in both, in place,
for every type that is used here (FP32, FP64, BF16, INT64). Every call must be made by all ranks of the group, and the
calls of one group in one order.
"""

import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dstrain.config.errors import InputError, StoppedElsewhere
from dstrain.parallel.place import here

T = TypeVar("T")
# PyTorch 2.13 renamed them, and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CommunicationError(RuntimeError):
    """A collective that failed or timed out; the line says which one, over which ranks."""


class Started:
    """A collective on its way."""

    def __init__(self, work: dist.Work | None, what: str):
        self.work, self.what = work, what

    def wait(self) -> None:
        """On CUDA the current stream waits, on the CPU the caller. Raises CommunicationError."""
        if self.work is not None:
            _named(self.what, self.work.wait, stream=True)
            self.work = None


class Group:
    """Some ranks of the world, ascending, this one among them. A group of one communicates with nobody."""

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None = None):
        self.ranks, self.handle = ranks, handle
        self.index = ranks.index(rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks[:8]))}{', …' if self.size > 8 else ''}"

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of flat [size · n]: the `index`-th n elements, a view."""
        part = len(flat) // self.size
        return flat[self.index * part : (self.index + 1) * part]

    def reduce_scatter(self, flat: torch.Tensor, what: str) -> Started:
        """flat [size · n]: this rank's part becomes the sum of all ranks'; what the rest then holds is unspecified."""
        return self._start(lambda: _reduce_scatter(self.own(flat), flat, group=self.handle, async_op=True),
                           f"reduce-scatter of {what}")

    def all_gather(self, flat: torch.Tensor, what: str) -> Started:
        """flat [size · n]: each rank's part is copied to all ranks."""
        return self._start(lambda: _all_gather(flat, self.own(flat), group=self.handle, async_op=True),
                           f"all-gather of {what}")

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Started:
        """The sum over the ranks, in place. Floats: in the backend's order, see `total`."""
        return self._start(lambda: dist.all_reduce(tensor, group=self.handle, async_op=True), f"all-reduce of {what}")

    def total(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """values [n], few -> their sum over the ranks, added up in their order: every rank gets the same bits."""
        everyone = values.new_empty(self.size * len(values))
        self.own(everyone).copy_(values)
        self.all_gather(everyone, what).wait()
        return everyone.view(self.size, -1).sum(dim=0)

    # Python objects, over a group whose backend takes CPU tensors (`Mesh.host_group`) -----------------------------

    def gather_objects(self, value: T, what: str) -> list[T]:
        """Every rank's value, in the order of ranks."""
        everyone: list[Any] = [value] * self.size
        if self.size > 1:
            _named(f"exchange of {what} over {self}",
                   lambda: dist.all_gather_object(everyone, value, group=self.handle))
        return everyone

    def first_object(self, value: T, what: str) -> T:
        """The value of the group's first rank."""
        box = [value]
        if self.size > 1:
            _named(f"broadcast of {what} over {self}",
                   lambda: dist.broadcast_object_list(box, src=self.ranks[0], group=self.handle))
        return box[0]

    def together(self, action: Callable[[], T], what: str, name_rank: bool = False) -> T:
        """action() of this rank, once it has succeeded on all of them; where one has bad input none goes on alone.

        The first rank with an InputError raises it, the others raise StoppedElsewhere, once all are done. name_rank: its
        line names the rank, unless all failed alike.
        """
        result = error = None
        try:
            result = action()
        except InputError as caught:
            error = caught
        lines = self.gather_objects(None if error is None else str(error), what)
        failed = [index for index, line in enumerate(lines) if line is not None]
        if not failed:
            return result
        if failed[0] != self.index:
            raise StoppedElsewhere
        if name_rank and len(set(lines)) > 1:
            raise InputError(f"rank {self.ranks[self.index]}: {error}") from error
        raise error

    def _start(self, start: Callable[[], dist.Work], what: str) -> Started:
        if self.size == 1:
            return Started(None, what)
        what = f"{what} over {self}"
        return Started(_named(what, start), what)


def new_groups(sets: Iterable[tuple[int, ...]], rank: int, timeout: timedelta, backend: str | None = None) -> dict:
    """Rank set -> Group, for the sets that `rank` is in. All ranks of the world call this with the same sets.

    One process group for each set of several ranks, made in sorted order, as torch.distributed demands.
    """
    groups = {}
    for ranks in sorted(set(sets)):
        handle = dist.new_group(list(ranks), timeout=timeout, backend=backend) if len(ranks) > 1 else None
        if rank in ranks:
            groups[ranks] = Group(ranks, rank, handle)
    return groups


def host_backend() -> str:
    """What the world exchanges CPU tensors by."""
    backends = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    return backends.get("cpu", dist.get_backend())


def _named(what: str, call: Callable[[], T], stream: bool = False) -> T:
    try:
        with here.waiting(what, stream):
            return call()
    except RuntimeError as error:
        raise CommunicationError(f"{what} failed: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """PyTorch's words for it, without the place in its sources and without gloo's general advice."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", text).partition(" This is typically caused by")[0]
