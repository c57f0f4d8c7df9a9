"""What a step adds up over the ranks: counts, losses, expert loads. Each total has the same bits on every rank.

Every pipeline rank reads its micro-batches' tokens itself, so valid positions are counted once for each data rank. A
loss or a load arises on the one rank that ran that head or that router on that micro-batch, so these are summed over
the world, whichever ranks hold the layer.
"""

import torch

from dstrain.model.model import Model
from dstrain.parallel.mesh import Mesh


def total_counts(mesh: Mesh, counts: torch.Tensor) -> torch.Tensor:
    """counts int64 [D + 1], the valid positions in this data rank's part of the batch -> those of the global batch."""
    total = counts.clone()
    mesh.dp_group.all_reduce(total, "counts of valid positions").wait()
    return total


def total_sums(mesh: Mesh, sums: torch.Tensor) -> torch.Tensor:
    """sums FP64 [n], what arose on this rank -> over the world. A NaN of one rank is a NaN on all."""
    return mesh.world_group.total(sums, "losses")


def total_loads(mesh: Mesh, model: Model, layers: list[int]) -> torch.Tensor:
    """int64 [layers, experts], what all routers of the world have counted; layers: all MoE layers of the model."""
    total = torch.zeros(len(layers), model.config.n_routed_experts, dtype=torch.int64, device=model.device)
    for layer, router in zip(model.moe_layers, model.routers, strict=True):
        total[layers.index(layer)] = router.load
    mesh.world_group.all_reduce(total, "expert loads").wait()
    return total
