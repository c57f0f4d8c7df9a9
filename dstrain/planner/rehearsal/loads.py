"""Stated expert loads: what a rehearsal's dispatchers take in place of the counts that they would read from the device.

balanced    every token goes to as many groups of experts as it may, and every expert gets as many tokens as any other,
            to a few: token n takes the groups n, n + 1, …, and their experts in turn.
worst       every token of every rank takes the first experts, all that one token may have: no rank can get more rows
            than the first of an expert-parallel group does then. Nothing is dropped, so nothing limits it further.

Both are routing tables that a router can give (distinct experts, no more groups than are kept), in every layer and
micro-batch. Counts are made of them as the dispatchers make them.
"""

import numpy as np
import torch

from dstrain.config.schema import ModelConfig
from dstrain.parallel.dispatch import Done, LocalDispatcher
from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.dispatch_layout import filled
from dstrain.parallel.dispatch_nodes import NodeLimitedDispatcher

LOADS = ("balanced", "worst")


def routing_table(load: str, model: ModelConfig, tokens: int, rank: int) -> np.ndarray:
    """Experts of a rank's tokens, int64 [tokens, k]; rank: in its expert-parallel group."""
    k = model.num_experts_per_tok
    if load == "worst":
        return np.broadcast_to(np.arange(k), (tokens, k))
    limited = model.topk_method != "greedy" and model.n_group > 1
    groups, kept = (model.n_group, min(model.topk_group, k)) if limited else (1, 1)
    size = model.n_routed_experts // groups
    token, choice = np.arange(rank * tokens, (rank + 1) * tokens)[:, None], np.arange(k)[None, :]
    number, group = choice // kept, (token + choice % kept) % groups
    visit = token // groups * kept + choice % kept  # how many tokens this group had before, where all are full
    return group * size + (visit * -(-k // kept) + number) % size


class StatedLoads:
    """The counts of one expert-parallel group's ranks, for the dispatcher of one of them."""

    def __init__(self, load: str, model: ModelConfig, tokens: int, ranks: int, nodes: int, rank: int):
        """nodes: of the group; rank: in it."""
        self.rank, self.ranks, self.nodes = rank, ranks, nodes
        experts = model.n_routed_experts
        tables = [routing_table(load, model, tokens, source) for source in range(ranks)]
        self.rows = np.stack([np.bincount(table.ravel(), minlength=experts) for table in tables])  # [source, expert]
        node = [table // (experts // nodes) for table in tables]
        self.visits = np.stack([(one[:, :, None] == np.arange(nodes)).any(1).sum(0) for one in node])  # [source, node]

    @property
    def load(self) -> float:
        """Rows of the rank's experts over the mean."""
        return float(self.of(self.rank).sum() * self.ranks / self.rows.sum())

    def of(self, rank: int) -> np.ndarray:
        """Rows that a rank's experts get, [source, expert]."""
        return self.rows.reshape(self.ranks, self.ranks, -1)[:, rank]

    def counts(self, per_node: bool) -> np.ndarray:
        """What `host_counts` gives: int32 [2, ranks, width], sent to and received from every rank of the group."""
        if not per_node:
            return np.stack([self.rows[self.rank].reshape(self.ranks, -1), self.of(self.rank)]).astype(np.int32)
        by_node = np.concatenate([self.visits[:, :, None], self.rows.reshape(self.ranks, self.nodes, -1)], axis=2)
        per = self.ranks // self.nodes
        sent, received = by_node[self.rank].repeat(per, axis=0), by_node[:, self.rank // per]
        return np.stack([sent, received]).astype(np.int32)

    def state(self, dispatcher: LocalDispatcher | AllToAllDispatcher) -> None:
        """From now on the dispatcher takes these loads, whatever ids it gets."""
        if isinstance(dispatcher, LocalDispatcher):
            total = filled(self.rows[0].tolist(), dispatcher.alignment)
            dispatcher.host_total = lambda room: total
            return
        stated = self.counts(isinstance(dispatcher, NodeLimitedDispatcher))

        def host_counts(counts: torch.Tensor) -> Done:
            if tuple(counts.shape) != stated.shape:
                raise ValueError(f"counts {list(counts.shape)} of a dispatch, stated are {list(stated.shape)}")
            return Done(stated)

        dispatcher.host_counts = host_counts
