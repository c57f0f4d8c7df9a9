"""What each pipeline rank holds: parameters with their elements, their replica group and the stages that use them."""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from dstrain.config.schema import ModelConfig
from dstrain.model.model import Model
from dstrain.model.share import Share
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.replicas import Replicas, holds, is_expert
from dstrain.planner.job import Job


@dataclass(frozen=True)
class Held:
    """Parameters of one layer, or one outside of layers, that have the same replica group and type."""

    name: str  # of one of them
    numel: int
    itemsize: int  # bytes of an element of the weight itself
    quantized: bool  # FP8 keeps it as E4M3 too
    ranks: tuple[int, ...]  # of the world, that hold it
    stages: frozenset[int]  # of this pipeline rank, that use it


def holdings(job: Job) -> list[list[Held]]:
    """By pipeline rank, of its first data rank: all data ranks of a pipeline rank hold as much."""
    layout, model = job.layout, job.config.model
    mesh, found = layout.mesh, []
    of_stage = [Share.of_units(model, units) for units in layout.partition.stages]
    groups = _groups(model, mesh.ep)
    for pp_rank in range(mesh.pp):
        here = Mesh(mesh.world_size, pp_rank * mesh.dp, mesh.pp, mesh.ep)
        replicas = Replicas(here, model, layout.replicas.shares)
        known: dict[tuple, tuple[int, ...]] = {}  # replica groups are long and few
        own = []
        for (name, is_wide, is_linear), numel in groups.items():
            stages = frozenset(s for s in layout.partition.stages_on[pp_rank] if holds(of_stage[s], name))
            if not stages:
                continue
            ranks = replicas.ranks(name)
            own.append(Held(
                name, numel, job.formats.wide if is_wide else job.formats.compute, is_linear and job.formats.fp8,
                known.setdefault(ranks, ranks), stages,
            ))
        found.append(own)
    return found


_counted: dict[tuple, Counter] = {}


def _groups(model: ModelConfig, ep: int) -> Counter:
    """(name of the first, at least FP32, FP8 product) -> elements on one rank that holds all layers, counted once."""
    key = repr(model), ep
    if key not in _counted:
        with torch.device("meta"):
            share = replace(Share.whole(model), experts=range(model.n_routed_experts // ep))
            whole = Model(model, torch.bfloat16, share)
        first: dict[tuple, str] = {}
        counts: Counter = Counter()
        for name, weight in whole.named_parameters():
            layer = ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name
            kind = weight.dtype == torch.float32, _is_fp8(name, weight)
            counts[first.setdefault((layer, is_expert(name), *kind), name), *kind] += weight.numel()
        _counted[key] = counts
    return _counted[key]


def _is_fp8(name: str, weight: torch.Tensor) -> bool:
    """Whether its products are FP8 in an FP8 run: the matrices of attention and FFNs but for the gate."""
    return weight.ndim > 1 and (".self_attn." in name or ".mlp." in name) and ".mlp.gate." not in name
