"""Bytes that a rank sends: to experts, along the pipeline, for gradients and for weights; by link.

slow: between nodes. fast: inside one. Dispatch is counted on routing tables by the function that the dispatchers' own
counters are checked against (parallel/dispatch_traffic.py); the tables are the model's own router's, on random scores.
"""

from dataclasses import dataclass, replace

import torch

from dstrain.model.router import Router
from dstrain.parallel.dispatch_traffic import PHASES, routing_traffic
from dstrain.parallel.payload import PAYLOADS
from dstrain.planner.job import Job

SAMPLE = 2048  # tokens of all ranks together that are routed to find the average
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Links:
    slow: float = 0
    fast: float = 0

    def __add__(self, other: "Links") -> "Links":
        return Links(self.slow + other.slow, self.fast + other.fast)

    def __mul__(self, factor: float) -> "Links":
        return Links(self.slow * factor, self.fast * factor)

    def seconds(self, job: Job) -> float:
        """Both links work at once."""
        return max(self.slow / job.cluster.network_gbps, self.fast / job.cluster.node_gbps) / 1e9


def dispatch_links(job: Job) -> dict[str, Links]:
    """By phase (dispatch, combine, dispatch_backward, combine_backward): bytes of one layer and micro-batch.

    Of the busiest rank: the mean times expert_load. Nothing with one expert-parallel rank.
    """
    if job.config.parallel.ep == 1:
        return {phase: Links() for phase in PHASES[1:]}
    return {phase: links * (job.tokens * job.config.expert_load) for phase, links in _per_token(job).items()}


def hidden_bytes(job: Job) -> float:
    """A hidden state of one micro-batch, or its gradient."""
    return job.tokens * job.config.model.hidden_size * job.formats.compute


def links_between(job: Job, ranks: tuple[int, ...], size: float) -> Links:
    """Bytes that each of these ranks sends in a reduce-scatter, or in an all-gather, of `size` bytes: a ring."""
    sent = size * (len(ranks) - 1) / len(ranks)
    return Links(slow=sent) if job.is_slow(ranks) else Links(fast=sent)


_counted: dict[tuple, dict[str, Links]] = {}


def _per_token(job: Job) -> dict[str, Links]:
    """By phase, what a token of the mean rank costs; counted once for every kind of routing and group."""
    model, ep = job.config.model, job.config.parallel.ep
    per_node, payload = min(job.layout.ranks_per_node, ep), job.config.parallel.dispatch
    key = (model.n_routed_experts, model.n_group, model.topk_group, model.num_experts_per_tok, model.topk_method,
           model.hidden_size, job.formats.compute, ep, per_node, payload)
    if key not in _counted:
        router = Router(replace(model, hidden_size=1), torch.float32)  # its selection alone is asked
        tokens = max(SAMPLE // ep, 8)
        scores = torch.rand(ep, tokens, model.n_routed_experts, generator=torch.Generator().manual_seed(0))
        traffic = routing_traffic(
            [router.select(own) for own in scores], model.n_routed_experts, per_node, node_limited=ep > per_node,
            hidden=model.hidden_size, dtype=DTYPES[job.formats.compute], payload=PAYLOADS[payload],
        )
        total = {phase: Links(*(sum(own.bytes[phase, link] for own in traffic) for link in ("slow", "fast")))
                 for phase in PHASES[1:]}
        _counted[key] = {phase: links * (1 / (ep * tokens)) for phase, links in total.items()}
    return _counted[key]
