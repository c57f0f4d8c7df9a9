"""Bytes that token dispatch sends over slow links (between nodes) and fast ones (inside a node, to another rank).

`Traffic` counts what a rank really sends; `routing_traffic` gives the same numbers from routing tables alone. Every
byte of a message counts: hidden states, scales, weights, ids, the few bytes that fill up a row, the exchange of sizes.
"""

from collections import Counter
from math import prod

import torch

from dstrain.parallel.dispatch_layout import count
from dstrain.parallel.payload import Payload

PHASES = ("sizes", "dispatch", "combine", "combine_backward", "dispatch_backward")


class Traffic:
    """Bytes sent by this rank since the last reset, by phase and link."""

    def __init__(self):
        self.bytes = Counter()

    def add(self, phase: str, links: list[str], rows: list[int], row_bytes: int) -> None:
        """rows[j] rows went to the peer behind links[j]: slow | fast | none (the rank itself)."""
        for link, sent in zip(links, rows, strict=True):
            if link != "none":
                self.bytes[phase, link] += sent * row_bytes

    def metrics(self) -> dict[str, int]:
        """dispatch_slow_bytes, …, and their sums slow_bytes and fast_bytes."""
        found = {f"{phase}_{link}_bytes": self.bytes[phase, link] for phase in PHASES for link in ("slow", "fast")}
        for link in ("slow", "fast"):
            found[f"{link}_bytes"] = sum(self.bytes[phase, link] for phase in PHASES)
        return found

    def reset(self) -> None:
        self.bytes.clear()


def link_between(rank: int, other: int, ranks_per_node: int) -> str:
    """none | fast | slow, for global ranks that fill one node after the other."""
    if rank == other:
        return "none"
    return "fast" if rank // ranks_per_node == other // ranks_per_node else "slow"


def row_layout(columns: list[torch.Tensor]) -> tuple[list[int], int]:
    """Columns [n, width] that share a row of bytes -> where each one starts, and the bytes of a row.

    All are multiples of 8, so that a column can be viewed in its type whatever that is.
    """
    starts, end = [], 0
    for column in columns:
        starts.append(end)
        end += -(-prod(column.shape[1:]) * column.element_size() // 8) * 8
    return starts, end


def routing_traffic(
    topk_ids: list[torch.Tensor],
    experts: int,
    ranks_per_node: int,
    node_limited: bool,
    hidden: int,
    dtype: torch.dtype,
    payload: Payload,
    weights_dtype: torch.dtype = torch.float32,
) -> list[Traffic]:
    """What each of len(topk_ids) ranks sends for one forward and backward pass of its tokens.

    topk_ids: by rank, int64 [T, k], -1 for no expert. Experts lie on the ranks in equal ranges.
    """
    ranks, traffic = len(topk_ids), [Traffic() for _ in topk_ids]
    choices = topk_ids[0].shape[1]
    sizes = _Sizes(hidden, choices, dtype, payload, weights_dtype)
    nodes = ranks // ranks_per_node
    ways = [[link_between(rank, other, ranks_per_node) for other in range(ranks)] for rank in range(ranks)]
    width = 1 + experts // nodes if node_limited else experts // ranks
    for rank in range(ranks):
        traffic[rank].add("sizes", ways[rank], [1] * ranks, -(-width * 4 // 8) * 8)

    def there_and_back(source, target, n, kind):
        for phase, row_bytes in sizes.of[kind].items():
            sender, receiver = (target, source) if phase in ("combine", "dispatch_backward") else (source, target)
            traffic[sender].add(phase, [ways[sender][receiver]], [n], row_bytes)

    for rank, ids in enumerate(topk_ids):
        if not node_limited:
            for target, n in enumerate(count(ids, experts).view(ranks, -1).sum(1).tolist()):
                there_and_back(rank, target, n, "choice")
            continue
        node_of = torch.where(ids < 0, -1, ids // (experts // nodes))
        for node in range(nodes):
            forwarder = node * ranks_per_node + rank % ranks_per_node
            there_and_back(rank, forwarder, int((node_of == node).any(1).sum()), "token")
            first = node * ranks_per_node
            pieces = count(ids, experts).view(ranks, -1).sum(1)[first : first + ranks_per_node].tolist()
            for i, n in enumerate(pieces):
                there_and_back(forwarder, first + i, n, "choice")
    return traffic


class _Sizes:
    """Bytes of a row by what it carries (one choice, or a token for a node) and phase."""

    def __init__(self, hidden: int, choices: int, dtype: torch.dtype, payload: Payload, weights_dtype: torch.dtype):
        state = torch.empty(0, hidden, dtype=dtype)
        coded = payload.encode(state)
        weight, weights = torch.empty(0, 1, dtype=weights_dtype), torch.empty(0, choices, dtype=weights_dtype)
        ids = torch.empty(0, choices, dtype=torch.int32)
        self.of = {
            "choice": self._phases([*coded, weight], [state], coded, [state, weight]),
            "token": self._phases([*coded, weights, ids], [state], coded, [state, weights]),
        }

    @staticmethod
    def _phases(*columns: list[torch.Tensor]) -> dict[str, int]:
        return {phase: row_layout(each)[1] for phase, each in zip(PHASES[1:], columns, strict=True)}
