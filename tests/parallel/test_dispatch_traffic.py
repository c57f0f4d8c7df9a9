"""Bytes over slow and fast links: by hand, from routing tables, and the saving of node-limited dispatch."""

import pytest
import torch

from dstrain.parallel.dispatch_traffic import link_between, routing_traffic
from dstrain.parallel.payload import PAYLOADS

COMPUTE, FP8 = PAYLOADS["compute"], PAYLOADS["fp8"]


def test_links_are_told_from_the_nodes_of_the_ranks():
    assert [link_between(2, other, 2) for other in range(5)] == ["slow", "slow", "none", "fast", "slow"]


def test_one_token_by_hand():
    """4 ranks on 2 nodes, 8 experts, 2 a rank; one token on rank 0 chooses 2 (its node), 4, 7 (the other one), and -1.

    Hidden 256: 512 bytes in BF16; in FP8 256 codes and 2 exponents, filled up to 8. A weight takes 4 bytes, filled up
    to 8; four weights or four ids 16. Sizes: 2 counts for each of the other ranks; node-limited 1 + 4 counts, filled up
    to 24 bytes.
    """
    none = torch.empty(0, 4, dtype=torch.int64)
    tables = [torch.tensor([[2, 4, 7, -1]]), none, none, none]

    def sent(node_limited: bool, payload=COMPUTE) -> list[dict[str, int]]:
        ranks = routing_traffic(tables, 8, 2, node_limited, 256, torch.bfloat16, payload)
        return [{name: n for name, n in rank.metrics().items() if n} for rank in ranks]

    flat, nodes = sent(False), sent(True)
    assert flat[0] == {
        "sizes_slow_bytes": 16, "sizes_fast_bytes": 8,
        "dispatch_slow_bytes": 2 * 520, "dispatch_fast_bytes": 520,
        "combine_backward_slow_bytes": 2 * 512, "combine_backward_fast_bytes": 512,
        "slow_bytes": 2 * 520 + 2 * 512 + 16, "fast_bytes": 520 + 512 + 8,
    }  # fmt: skip
    assert flat[2]["combine_slow_bytes"] == 512 and flat[2]["dispatch_backward_slow_bytes"] == 520
    assert flat[1]["combine_fast_bytes"] == 512 and "combine_slow_bytes" not in flat[1]

    # Rank 2 forwards to itself (4) and to rank 3 (7); rank 0 forwards 2 to rank 1.
    assert nodes[0] == {
        "sizes_slow_bytes": 48, "sizes_fast_bytes": 24,
        "dispatch_slow_bytes": 512 + 16 + 16, "dispatch_fast_bytes": 520,
        "combine_backward_slow_bytes": 512, "combine_backward_fast_bytes": 512,
        "slow_bytes": 512 + 32 + 512 + 48, "fast_bytes": 520 + 512 + 24,
    }  # fmt: skip
    assert nodes[2]["combine_slow_bytes"] == 512 and nodes[2]["dispatch_backward_slow_bytes"] == 512 + 16
    assert nodes[2]["dispatch_fast_bytes"] == 520 and nodes[3]["dispatch_backward_fast_bytes"] == 520

    fp8 = sent(True, FP8)
    assert fp8[0]["dispatch_slow_bytes"] == 256 + 8 + 32 and fp8[0]["combine_backward_slow_bytes"] == 256 + 8
    assert fp8[2]["combine_slow_bytes"] == 512 and fp8[2]["dispatch_backward_slow_bytes"] == 528


def grouped_routing(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Random top-8 of 256 experts inside 4 random groups of 8."""
    scores = torch.rand(tokens, 8, 32, generator=generator)
    dropped = torch.rand(tokens, 8, generator=generator).argsort(1)[:, 4:]
    scores.scatter_(1, dropped.unsqueeze(-1).expand(-1, -1, 32), -1)
    return scores.flatten(1).topk(8).indices


@pytest.mark.parametrize("payload", [COMPUTE, FP8], ids=["bf16", "fp8"])
def test_node_limited_moves_little_more_than_half_over_the_slow_links(payload):
    """8 nodes of 2 ranks, V3's width. At most 0.55, everything counted. By theory 8 picks hit of 4 groups of 32
    4 · (1 - C(96, 8) / C(128, 8)) = 3.63 nodes, against 8 rows of one copy per (token, expert): 0.454."""
    generator = torch.Generator().manual_seed(0)
    tables = [grouped_routing(512, generator) for _ in range(16)]
    slow = {}
    for node_limited in (False, True):
        ranks = routing_traffic(tables, 256, 2, node_limited, 7168, torch.bfloat16, payload)
        for phase in ("slow", "dispatch_slow", "combine_slow", "combine_backward_slow", "dispatch_backward_slow"):
            slow[node_limited, phase] = sum(rank.metrics()[f"{phase}_bytes"] for rank in ranks)
    ratios = {phase: slow[True, phase] / slow[False, phase] for _, phase in slow}
    assert all(0.44 < ratio < 0.47 for ratio in ratios.values()), ratios
