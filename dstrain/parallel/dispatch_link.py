"""What dispatchers between ranks stand on: an asynchronous exchange of rows, and the lane on which exchanges run."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from dstrain.parallel.dispatch_traffic import Traffic, link_between, row_layout
from dstrain.parallel.group import CommunicationError, one_line
from dstrain.parallel.place import here


class Link:
    """The ranks of one group, exchanging rows. Every exchange is one collective in which all of them take part."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int, traffic: Traffic):
        self.group, self.traffic = group, traffic
        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.index = len(self.ranks), group.rank()
        self.rank = self.ranks[self.index]
        self.kinds = [link_between(self.rank, other, ranks_per_node) for other in self.ranks]
        self.exchanges = 0

    def exchange(
        self, phase: str, columns: list[tuple[torch.Tensor, torch.Tensor | None]], sent: list[int], received: list[int]
    ) -> "Exchange":
        """Start sending rows: the first sent[0] rows go to the group's first rank, and so on.

        columns: (tensor [m, width], index int64 [n] of the rows to send; None: all rows in their order), side by side
        in one row of bytes. -> by waiting, the received columns [sum(received) + 1, width]; the last row is zeros.
        """
        tensors = [tensor for tensor, _ in columns]
        starts, width = row_layout(tensors)
        device = tensors[0].device
        outgoing = torch.empty(sum(sent), width, dtype=torch.uint8, device=device)
        for (tensor, index), view in zip(columns, self._columns(outgoing, tensors, starts)):
            if index is None:
                view.copy_(tensor)
            else:
                torch.index_select(tensor, 0, index, out=view)
        incoming = torch.empty(sum(received) + 1, width, dtype=torch.uint8, device=device)
        incoming[-1] = 0
        work = dist.all_to_all_single(incoming[:-1], outgoing, received, sent, group=self.group, async_op=True)
        self.traffic.add(phase, self.kinds, sent, width)
        self.exchanges += 1
        what = (
            f"rank {self.rank} waited for ranks {self.ranks} in {phase}: all-to-all number {self.exchanges} of this "
            f"group, {sum(sent)} rows out, {sum(received)} rows in, {width} bytes each"
        )
        return Exchange(work, what, self._columns(incoming, tensors, starts))

    @staticmethod
    def _columns(buffer: torch.Tensor, like: list[torch.Tensor], starts: list[int]) -> list[torch.Tensor]:
        return [
            buffer[:, start : start + tensor.shape[1] * tensor.element_size()].view(tensor.dtype)
            for start, tensor in zip(starts, like)
        ]


class Exchange:
    """Rows on their way."""

    def __init__(self, work: dist.Work, what: str, columns: list[torch.Tensor]):
        self.work, self.what, self.columns = work, what, columns

    def ready(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> list[torch.Tensor]:
        try:
            with here.waiting(self.what):
                self.work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{self.what}: {one_line(error)}") from error
        return self.columns


class Lane:
    """Where a dispatcher's communications run, one after the other, beside the computation.

    A communication has two parts: `begin` starts an exchange (the last slow one), `finish` takes what it brought.

    On the CPU `begin` runs at once and `finish` when the result is waited for. On CUDA both are put at once on a stream
    of their own, where waiting for an exchange stops nothing else. Tensors cross between the two streams safely: the
    lane starts behind everything the computing stream was given before, allocates only then, and whatever it reads is
    held until the computing stream has been put behind its end.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, begin: Callable[[], Exchange], finish: Callable) -> "Started":
        """-> a Pending of finish(what the exchange brought)."""
        if self.stream is None:
            return Started(begin(), finish)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = finish(begin().wait())
            return Enqueued(result, self.stream.record_event(), (begin, finish))


class Started:
    """On the CPU: the exchange runs, the rest is done by whoever waits."""

    def __init__(self, exchange: Exchange, finish: Callable):
        self.exchange, self.finish = exchange, finish

    def ready(self) -> bool:
        return self.exchange.ready()

    def wait(self):
        return self.finish(self.exchange.wait())


class Enqueued:
    """On CUDA: everything is on the lane's stream. held: what must outlive it."""

    def __init__(self, result, end: torch.cuda.Event, held: tuple):
        self.result, self.end, self.held = result, end, held

    @staticmethod
    def ready() -> bool:
        """Always: the host is ahead of the device, so that its answer would be no whatever the link.

        What starts behind experts(B) starts on the lane behind experts(B)'s end, too. By the published medians the
        counts are there while combine(B) is still under way, so the host's wait for them costs the device nothing.
        """
        return True

    def wait(self):
        with here.waiting("token dispatch", stream=True):
            torch.cuda.current_stream().wait_event(self.end)
        self.held = None
        return self.result


class HostCopy:
    """A tensor on its way to the host, started on the current stream."""

    def __init__(self, tensor: torch.Tensor):
        self.end = None
        if not tensor.is_cuda:
            self.host = tensor
            return
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.end = torch.cuda.current_stream().record_event()

    def wait(self) -> np.ndarray:
        if self.end is not None:
            self.end.synchronize()
        return self.host.numpy()
