"""Hidden states and their gradients from pipeline rank to pipeline rank.

A message is its bytes and nothing else: both sides know the order of every channel from the schedule, and the shape
from the micro-batch. A channel is one direction between two ranks and has a communicator of its own. On CUDA a
communicator's operations run one after the other on its stream, so a receive that waits can hold up only what comes
behind it in the same channel, whose order is the sender's: no circle of waits. Receives are posted ahead and waited
for where the data is needed, on CUDA by the stream alone; a send is waited for only when it is known to be over.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dstrain.parallel.group import CommunicationError, one_line
from dstrain.parallel.place import here
from dstrain.parallel.schedules.messages import Message, Traffic


class TransferError(CommunicationError):
    """A message did not come, or could not go, in time or at all: another rank is late, has failed or is gone."""


class Channels:
    """The communicators of a rank's pipeline. Made once, by all ranks of the world together."""

    def __init__(self, pairs: set[tuple[int, int]], pipelines: list[list[int]], timeout: float, device: torch.device):
        """pairs: (source, target) pipeline ranks. pipelines: the global ranks of every pipeline, by pipeline rank.

        timeout: seconds that any wait may take. Raises TransferError when a channel does not open.
        """
        self.timeout, self.device = timeout, device
        self.groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        me = dist.get_rank()
        self.members = next(members for members in pipelines if me in members)
        # Every rank of the world must call new_group for every group, in the same order.
        for members in pipelines:
            for source, target in sorted(pairs):
                ranks = [members[source], members[target]]
                with opening(source, target):
                    group = dist.new_group(sorted(ranks), timeout=timedelta(seconds=timeout))
                if me in ranks:
                    self.groups[source, target] = group
        # NCCL connects at a communicator's first operation, and blocks both hosts for it. In the order of the pairs,
        # the same on all ranks, nobody waits in a circle; in the order of a schedule somebody would.
        token = torch.zeros(1, device=device)
        for source, target in sorted(self.groups):
            operation = self.send if me == self.members[source] else self.receive
            with opening(source, target):
                self.wait(operation(token, source, target))

    def send(self, tensor: torch.Tensor, source: int, target: int) -> dist.Work:
        return dist.isend(tensor, self.members[target], group=self.groups[source, target])

    def receive(self, tensor: torch.Tensor, source: int, target: int) -> dist.Work:
        return dist.irecv(tensor, self.members[source], group=self.groups[source, target])

    def wait(self, work: dist.Work) -> None:
        """On the CPU the host waits, with the timeout. On CUDA the stream does, and NCCL's watchdog has the timeout."""
        if self.device.type == "cuda":
            work.wait()
        else:
            work.wait(timedelta(seconds=self.timeout))


class Transfer:
    """One rank's messages during one run of its list.

    What was sent is kept until it is gone. NCCL tells when; gloo tells only who waits, so there the schedule has to: a
    rank that made a message in its action k has posted its receives for all actions up to k, so waiting for what they
    take is a matter of the wire alone.
    """

    def __init__(self, channels: Channels, rank: int, traffic: Traffic, empty: Callable[[Message], torch.Tensor]):
        """empty: a fresh tensor to receive a message in."""
        self.channels, self.empty = channels, empty
        self.coming = {pair: deque(order) for pair, order in traffic.order.items() if pair[1] == rank}
        self.going = {pair: deque(order) for pair, order in traffic.order.items() if pair[0] == rank}
        self.posted: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self.sent: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self.needed_at = _positions(traffic.needs, lambda message: message.source == rank)
        self.produced_at = _positions(traffic.produces, lambda message: message.target == rank)

    def post(self, message: Message) -> None:
        """Be ready for `message`, and for whatever its channel brings before it."""
        pair = message.source, message.target
        while message not in self.posted:
            first = self.coming[pair].popleft()
            buffer = self.empty(first)
            self.posted[first] = self._start(self.channels.receive, first, buffer), buffer

    def receive(self, message: Message) -> torch.Tensor:
        """The tensor of a message that was posted."""
        work, buffer = self.posted.pop(message)
        self._wait(work, message)
        reached = self.produced_at[message]  # how far its list the other rank has come
        for earlier in [m for m in self.sent if m.target == message.source and self.needed_at[m] <= reached]:
            self._wait(self.sent.pop(earlier)[0], earlier)
        return buffer

    def send(self, message: Message, tensor: torch.Tensor) -> None:
        """Start; what is sent must not be written to any more."""
        due = self.going[message.source, message.target].popleft()
        if message != due:
            raise AssertionError(f"{message} is sent where its channel's order has {due}")
        tensor = tensor.contiguous()
        self.sent[message] = self._start(self.channels.send, message, tensor), tensor
        self.sent = {m: entry for m, entry in self.sent.items() if not entry[0].is_completed()}

    def finish(self) -> None:
        """Wait until everything is gone. What was to come must have come."""
        while self.sent:
            message = next(iter(self.sent))
            self._wait(self.sent.pop(message)[0], message)
        left = [*self.posted, *(m for queues in (self.coming, self.going) for queue in queues.values() for m in queue)]
        if left:
            raise AssertionError(f"the list is over, but not these: {', '.join(map(str, left))}")

    def _start(self, operation: Callable, message: Message, tensor: torch.Tensor) -> dist.Work:
        try:
            return operation(tensor, message.source, message.target)
        except RuntimeError as error:
            raise TransferError(f"{message}: cannot start ({one_line(error)})") from error

    def _wait(self, work: dist.Work, message: Message) -> None:
        start = time.monotonic()
        try:
            with here.waiting(message, stream=True):
                self.channels.wait(work)
        except RuntimeError as error:
            seconds = time.monotonic() - start
            why = "nothing within" if seconds >= self.channels.timeout else "cut off after"
            raise TransferError(f"{message}: {why} {seconds:.3g} s ({one_line(error)})") from error


def _positions(traffic: list[list[list[Message]]], mine: Callable[[Message], bool]) -> dict[Message, int]:
    """Message -> position of the action in the other rank's list."""
    return {m: at for actions in traffic for at, of_action in enumerate(actions) for m in of_action if mine(m)}


@contextmanager
def opening(source: int, target: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        what = f"channel from pipeline rank {source} to {target} does not open"
        raise TransferError(f"{what} ({one_line(error)})") from error
