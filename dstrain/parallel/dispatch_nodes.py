"""Node-limited dispatch in two hops: a token crosses the slow link at most once per node that has an expert of it.

    rail hop    source -> the rank of the same index in the target node: hidden state, weights, its experts there
    node hop    that rank (the forwarder) -> the ranks of these experts inside the node, one row an expert

On the CPU the rail hop runs beside the computation and the node hop while somebody waits; on CUDA both run beside it.

On the way back the forwarder sums a token's rows of its node and sends one row over the slow link; the source sums the
nodes, in their order. In a compute type of less than FP32 a token's sum is therefore rounded once at every forwarder
and once at the source, each time after adding in FP32; everything else is as with one hop. (arXiv 2412.19437 §3.2.2)
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from dstrain.config.errors import InputError
from dstrain.parallel.dispatch_all_to_all import (
    AllToAllDispatcher,
    ExpertExchange,
    exchange_counts,
    known,
    read_counts,
    weighted_rows,
)
from dstrain.parallel.dispatch_layout import Copies, count, filled
from dstrain.parallel.dispatch_link import Link
from dstrain.parallel.payload import Payload


class NodeLimitedDispatcher(AllToAllDispatcher):
    """As AllToAllDispatcher, over nodes of `ranks_per_node` ranks each, which are neighbours in `group`.

    Makes groups, so that all ranks of the world must build theirs at the same time; timeout is for the collectives in
    them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks_per_node: int,
        payload: Payload,
        device: torch.device,
        timeout: timedelta,
        alignment: int = 1,
    ):
        super().__init__(group, ranks_per_node, payload, device, alignment)
        ep = self.link.size
        if ep % ranks_per_node:
            raise InputError(
                f"parallel.ranks_per_node={ranks_per_node}: node-limited dispatch needs whole nodes, and "
                f"parallel.ep={ep} is no multiple of it; valid are divisors of {ep}"
            )
        self.nodes, self.ranks_per_node = ep // ranks_per_node, ranks_per_node
        node, self.place = divmod(self.link.index, ranks_per_node)
        ranks = self.link.ranks
        rail_ranks, node_ranks = ranks[self.place :: ranks_per_node], ranks[node * ranks_per_node :][:ranks_per_node]
        mine = tuple(rail_ranks), tuple(node_ranks)
        everyone: list[tuple] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        # Each group is made by the whole world: made by its members alone it would get its name from how many groups
        # each of them is in, and ranks that do not agree on that would wait for each other.
        sets = sorted({members for pair in everyone for members in pair})
        groups = {members: dist.new_group(list(members), timeout=timeout) for members in sets}
        self.rail, self.node = (Link(groups[members], ranks_per_node, self.traffic) for members in mine)

    def route(self, topk_ids: torch.Tensor, experts: int) -> "NodeLimitedDispatch":
        self.check(experts)
        return NodeLimitedDispatch(self, topk_ids, experts)


class NodeLimitedDispatch:
    """Counts have the width 1 + E/nodes: tokens for the receiver's node, then rows for each expert of that node."""

    def __init__(self, dispatcher: NodeLimitedDispatcher, topk_ids: torch.Tensor, experts: int):
        self.lane, self.payload, self.dispatcher = dispatcher.lane, dispatcher.payload, dispatcher
        nodes = dispatcher.nodes
        self.topk_ids, self.per_node = topk_ids, experts // nodes

        def begin():
            self.node_of_slot = torch.where(topk_ids < 0, nodes, topk_ids // self.per_node)
            visits = topk_ids.new_zeros(len(topk_ids), nodes + 1).scatter_(1, self.node_of_slot, 1)[:, :nodes]
            self.targets = torch.where(visits > 0, torch.arange(nodes, device=topk_ids.device), -1)  # [T, nodes]
            counts = torch.cat([visits.sum(0).unsqueeze(1), count(topk_ids, experts).view(nodes, -1)], 1)
            self.counts = counts.repeat_interleave(dispatcher.ranks_per_node, 0)
            return exchange_counts(dispatcher.link, self.counts)

        self.sizes = self.lane.start(begin, lambda received: read_counts(dispatcher, self.counts, received))

    def ready(self) -> bool:
        """Whether all counts are here."""
        return self.sizes.ready()

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor):
        """-> a Pending of rows [n, hidden] in x's type and row_weights [n]."""
        host, counts = known(self.sizes)
        nodes, per_rank = self.dispatcher.nodes, self.per_node // self.dispatcher.ranks_per_node
        place, alignment = self.dispatcher.place, self.dispatcher.alignment
        mine = slice(1 + place * per_rank, 1 + (place + 1) * per_rank)  # columns of this rank's experts
        out, into = host.reshape(2, nodes, self.dispatcher.ranks_per_node, -1)  # [nodes, ranks per node, width]
        forwarded = into[:, place, 1:].reshape(nodes, -1, per_rank)
        self.sent, self.received = out[:, 0, 0].tolist(), into[:, place, 0].tolist()

        def begin():
            self.copies = Copies(self.targets, nodes, sum(self.sent))
            token = self.copies.token
            first = self.targets.flatten()[self.copies.slot] * self.per_node
            ids = self.topk_ids[token] - first.unsqueeze(1)  # negative: an expert of an earlier node, or none
            ids = torch.where(ids < self.per_node, ids, -1).to(torch.int32)
            columns = [(column, token) for column in [*self.payload.encode(x), topk_weights]]
            return self.dispatcher.rail.exchange("dispatch", [*columns, (ids, None)], self.sent, self.received)

        def finish(columns):
            *coded, weights, ids = [column[:-1] for column in columns]
            self.exchange = ExpertExchange(
                self.dispatcher.node,
                ids.long(),
                counts.view(nodes, -1, counts.shape[1])[:, :, mine].permute(1, 2, 0),
                sent=forwarded.sum((0, 2)).tolist(),
                received=into[:, :, mine].sum((0, 2)).tolist(),
                total=filled(into[:, :, mine].sum((0, 1)).tolist(), alignment),
                alignment=alignment,
            )
            self.offsets = self.exchange.rows.offsets
            arrived = self.exchange.send("dispatch", coded, [weights.reshape(-1, 1)]).wait()
            return weighted_rows(self, arrived, x.dtype)

        return self.lane.start(begin, finish)

    def combine(self, rows: torch.Tensor):
        """-> a Pending of the sum of each token's rows, [T, hidden]; rounding: see above."""

        def begin():
            (copies,) = self.exchange.send_back("combine", [rows]).wait()
            return self._return("combine", [self.exchange.copies.sum(copies)])

        return self.lane.start(begin, lambda columns: self.copies.sum(columns[0]))

    def combine_backward(self, grad: torch.Tensor):
        def begin():
            columns = [(column, self.copies.token) for column in self.payload.encode(grad)]
            return self.dispatcher.rail.exchange("combine_backward", columns, self.sent, self.received)

        def finish(columns):
            arrived = self.exchange.send("combine_backward", [column[:-1] for column in columns]).wait()
            return self.payload.decode(self.exchange.sort(arrived), grad.dtype)

        return self.lane.start(begin, finish)

    def dispatch_backward(self, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor):
        def begin():
            arrived = self.exchange.send_back("dispatch_backward", [grad_rows, grad_row_weights.unsqueeze(-1)])
            grads, grad_weights = arrived.wait()
            copies = self.exchange.copies
            return self._return("dispatch_backward", [copies.sum(grads), copies.of_slots(grad_weights)])

        def finish(columns):
            grads, grad_weights = columns  # [copies + 1, hidden], [copies + 1, k]
            none = torch.full_like(self.copies.place[:, :1], sum(self.sent))
            copy_of_slot = torch.cat([self.copies.place, none], 1).gather(1, self.node_of_slot)
            choice = torch.arange(copy_of_slot.shape[1], device=grads.device)
            return self.copies.sum(grads), grad_weights[copy_of_slot, choice]

        return self.lane.start(begin, finish)

    def _return(self, phase: str, columns: list[torch.Tensor]):
        """Columns of forwarded tokens -> back over the slow link to their source."""
        return self.dispatcher.rail.exchange(phase, [(column, None) for column in columns], self.received, self.sent)
