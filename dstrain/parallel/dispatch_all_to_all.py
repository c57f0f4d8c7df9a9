"""Dispatch over one group of expert-parallel ranks: every (token, expert) row goes to the rank of its expert by itself.

Of E experts rank j holds j·E/ep … (j+1)·E/ep - 1. The ranks first tell each other how many rows they send to each
expert (started by `route`, so that it can run beside what stands between routing and dispatch). From these counts every
receiver knows where each row belongs: neither ids nor places travel. An expert's rows are ordered by source rank, then
token, as if one process had all tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from dstrain.config.errors import InputError
from dstrain.parallel.dispatch import Done
from dstrain.parallel.dispatch_layout import Copies, ExpertRows, count, filled
from dstrain.parallel.dispatch_link import Exchange, HostCopy, Lane, Link
from dstrain.parallel.dispatch_traffic import Traffic
from dstrain.parallel.payload import Payload


class AllToAllDispatcher:
    """Experts spread over the ranks of `group`. `traffic` counts the bytes sent; reset it when a step begins.

    ranks_per_node: which links count as fast. payload: in what form hidden states go to the experts. alignment: an
    expert that has rows gets a multiple of this many, filled up here and never sent.

    The ranks of a group start and wait for their communications in the same order, whatever number of tokens each has,
    0 included.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks_per_node: int,
        payload: Payload,
        device: torch.device,
        alignment: int = 1,
    ):
        self.traffic = Traffic()
        self.link = Link(group, ranks_per_node, self.traffic)
        self.lane, self.payload, self.alignment = Lane(device), payload, alignment

    def route(self, topk_ids: torch.Tensor, experts: int) -> "AllToAllDispatch":
        """topk_ids int64 [T, k], -1 for no expert."""
        self.check(experts)
        return AllToAllDispatch(self, topk_ids, experts)

    def check(self, experts: int) -> None:
        if experts % self.link.size:
            raise InputError(
                f"parallel.ep={self.link.size}: {experts} experts do not divide evenly; valid are divisors of {experts}"
            )

    def host_counts(self, counts: torch.Tensor) -> Done | HostCopy:
        """counts int32 [2, ep, width] -> a Pending of the same as a NumPy array, from which all sizes come.

        counts[0, j] is what this rank sends to rank j, counts[1, j] what rank j sends here; see `route` of each
        dispatcher for the width. The one place where the host waits for the device: a rehearsal without data states
        its loads here.
        """
        return HostCopy(counts)


class AllToAllDispatch:
    """Counts have the width E/ep: rows for each expert of the receiver."""

    def __init__(self, dispatcher: AllToAllDispatcher, topk_ids: torch.Tensor, experts: int):
        self.lane, self.payload = dispatcher.lane, dispatcher.payload
        self.dispatcher, self.topk_ids, self.experts = dispatcher, topk_ids, experts
        link = dispatcher.link

        def begin():
            self.counts = count(topk_ids, experts).view(link.size, -1)
            return exchange_counts(link, self.counts)

        self.sizes = self.lane.start(begin, lambda received: read_counts(dispatcher, self.counts, received))

    def ready(self) -> bool:
        """Whether all counts are here."""
        return self.sizes.ready()

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor):
        """-> a Pending of rows [n, hidden] in x's type and row_weights [n]."""
        host, counts = known(self.sizes)

        def begin():
            self.exchange = ExpertExchange(
                self.dispatcher.link,
                self.topk_ids,
                counts.unsqueeze(-1),
                sent=host[0].sum(1).tolist(),
                received=host[1].sum(1).tolist(),
                total=filled(host[1].sum(0).tolist(), self.dispatcher.alignment),
                alignment=self.dispatcher.alignment,
            )
            self.offsets = self.exchange.rows.offsets
            return self.exchange.send("dispatch", self.payload.encode(x), [topk_weights.reshape(-1, 1)])

        return self.lane.start(begin, lambda columns: weighted_rows(self, columns, x.dtype))

    def combine(self, rows: torch.Tensor):
        """-> a Pending of the sum of each token's rows, [T, hidden]: in at least FP32, rounded once."""
        return self.lane.start(
            lambda: self.exchange.send_back("combine", [rows]), lambda columns: self.exchange.copies.sum(columns[0])
        )

    def combine_backward(self, grad: torch.Tensor):
        return self.lane.start(
            lambda: self.exchange.send("combine_backward", self.payload.encode(grad)),
            lambda columns: self.payload.decode(self.exchange.sort(columns), grad.dtype),
        )

    def dispatch_backward(self, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor):
        def finish(columns):
            grads, grad_weights = columns
            copies = self.exchange.copies
            return copies.sum(grads), copies.of_slots(grad_weights)

        return self.lane.start(
            lambda: self.exchange.send_back("dispatch_backward", [grad_rows, grad_row_weights.unsqueeze(-1)]), finish
        )


class ExpertExchange:
    """The rows of one micro-batch between its tokens and the experts of a group's ranks; all sizes are known."""

    def __init__(
        self,
        link: Link,
        ids: torch.Tensor,
        counts: torch.Tensor,
        sent: list[int],
        received: list[int],
        total: int,
        alignment: int,
    ):
        """ids int64 [T, choices]: experts counted over the group. counts: as `ExpertRows` takes them."""
        self.link, self.sent, self.received = link, sent, received
        self.copies = Copies(ids, link.size * counts.shape[1], sum(sent))
        self.rows = ExpertRows(counts.long(), sum(received), total, alignment)

    def send(
        self, phase: str, by_token: Sequence[torch.Tensor], by_slot: Sequence[torch.Tensor] = ()
    ) -> Exchange:
        """Columns by_token [T, …] and by_slot [T · choices, …] -> at the experts, in the order of arrival."""
        columns = [(column, self.copies.token) for column in by_token]
        columns += [(column, self.copies.slot) for column in by_slot]
        return self.link.exchange(phase, columns, self.sent, self.received)

    def sort(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        """What arrived -> the same sorted by expert, filling rows zeros."""
        return [column.index_select(0, self.rows.copy_of_row) for column in columns]

    def send_back(self, phase: str, columns: Sequence[torch.Tensor]) -> Exchange:
        """Columns of rows sorted by expert -> at their tokens, in the order of `copies`."""
        return self.link.exchange(
            phase, [(column, self.rows.row_of_copy) for column in columns], self.received, self.sent
        )


def exchange_counts(link: Link, counts: torch.Tensor) -> Exchange:
    """counts [ep, width]: row j is for rank j."""
    ones = [1] * link.size
    return link.exchange("sizes", [(counts.to(torch.int32), None)], ones, ones)


def read_counts(dispatcher: AllToAllDispatcher, counts: torch.Tensor, received: list[torch.Tensor]):
    """-> a Pending of the counts on the host, and those received on the device, [ep, width]."""
    both = torch.stack([counts.to(torch.int32), received[0][:-1]])
    return dispatcher.host_counts(both), both[1]


def known(sizes) -> tuple[np.ndarray, torch.Tensor]:
    """-> what `read_counts` started: counts [2, ep, width] on the host, received counts [ep, width] on the device."""
    host, received = sizes.wait()
    return host.wait(), received


def weighted_rows(dispatch, columns: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of a payload and of weights as they arrived -> rows [n, hidden], row_weights [n]."""
    *coded, weights = dispatch.exchange.sort(columns)
    return dispatch.payload.decode(coded, dtype), weights.squeeze(-1)
