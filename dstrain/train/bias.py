"""The routing-bias update (arXiv 2408.15664): once per optimizer step, from the load of the whole global batch."""

import torch

from dstrain.model.router import Router


def update_bias(router: Router, load: torch.Tensor, speed: float) -> None:
    """b += speed · sign(mean load - load) in FP32. load int64 [experts], of all ranks: exact, so the sign is exact too."""
    if router.config.has_routing_bias:
        direction = torch.sign(load.sum() - load * len(load))
        router.e_score_correction_bias.add_(direction.to(torch.float32), alpha=speed)


def max_violation(loads: list[list[int]]) -> float:
    """Max over layers of max load / mean load - 1; 0.0 for a model without experts."""
    return max((max(load) * len(load) / sum(load) - 1 for load in loads if sum(load)), default=0.0)
