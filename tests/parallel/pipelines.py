"""Pipelines of small models for tests: stages, micro-batches, one rank's run, and the single process beside it."""

import torch
from oracle import random_weights, tiny_config
from small_models import ALPHA, MTP_WEIGHT

from dstrain.model.batch import MicroBatch
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.share import Share
from dstrain.model.unit import Unit, list_units
from dstrain.model.units import forward_backward
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.parallel.executor import Executor
from dstrain.parallel.schedules.build import build_schedule
from dstrain.parallel.schedules.messages import messages
from dstrain.parallel.transfer import Channels
from dstrain.precision.main_grad import attach_main_grads
from dstrain.precision.policy import resolve_precision

# MTP depth 4, heads on different stages, one dense block: 10 units, for up to the 8 stages of DualPipeV on 4 ranks.
CONFIG = tiny_config(num_hidden_layers=4, num_nextn_predict_layers=4, mtp_depth_weights=[0.4, 0.3, 0.2, 0.1])
ENDS = {2: [4], 4: [3, 5, 7], 8: [2, 3, 4, 5, 6, 7, 9]}  # stages -> where the units are cut
DEVICE = torch.device("cpu")


def cut(config, stages: int) -> list[list[Unit]]:
    units = list_units(config)
    places = [0, *ENDS[stages], len(units)] if stages > 1 else [0, len(units)]
    return [units[first:last] for first, last in zip(places, places[1:])]


def make_batches(config, count: int, seed: int = 7, length: int = 8) -> list[MicroBatch]:
    """Two sequences each, the last micro-batch one; documents end everywhere, so that valid counts differ."""
    generator = torch.Generator().manual_seed(seed)
    depth, batches = config.num_nextn_predict_layers, []
    for i in range(count):
        shape = (2 if i < count - 1 else 1, length + 1 + depth)
        tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
        documents = (torch.rand(shape, generator=generator) < 0.1).long().cumsum(1)
        batches.append(MicroBatch(tokens, documents, depth, document_mask=True))
    return batches


def loss_weights(config, batches: list[MicroBatch]) -> LossWeights:
    counts = torch.stack([batch.valid_counts() for batch in batches]).sum(0).tolist()
    sequences = sum(len(batch.tokens) for batch in batches)
    return LossWeights.of_batch(counts, sequences, MTP_WEIGHT, config.depth_weights, ALPHA)


def build(config, precision: str, share: Share | None = None) -> Model:
    """The model or a share of it, with the oracle's random weights."""
    weights, chosen = random_weights(config, seed=3), resolve_precision(precision, DEVICE)
    model = Model(config, chosen.compute, share, fp8=chosen.fp8)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            held = model.share.experts
            tensor.copy_(weights[name][held.start : held.stop] if ".mlp.experts." in name else weights[name])
    attach_main_grads(model, chosen.main)
    return model


def results(model: Model, sums: LossSums) -> dict:
    """Loss sums, gradients by name, loads by layer: plain copies."""
    assert not any(parameter.main_grad.requires_grad for parameter in model.parameters())
    return {
        "losses": torch.cat([sums.depths, sums.balance.view(1)]),
        "grads": {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()},
        "loads": {layer: router.load.clone() for layer, router in zip(model.moe_layers, model.routers, strict=True)},
    }


def single_process(config, precision, batches: list[MicroBatch]) -> dict:
    """What one process computes for these micro-batches: the right values."""
    model, sums = build(config, precision), LossSums(config.num_nextn_predict_layers, DEVICE)
    weights = loss_weights(config, batches)
    for batch in batches:
        forward_backward(model, batch, LocalDispatcher(), sums, weights)
    return results(model, sums)


class Rank:
    """One rank of a pipeline on its model's share.

    The world's ranks form world / ranks pipelines of the same: neighbours, or with `apart` every n-th.
    """

    def __init__(
        self, name, ranks, micro_batches, config, precision, rank, world, *,
        apart=False, experts=None, dispatcher=None, **options,
    ):  # fmt: skip
        self.schedule = build_schedule(name, ranks, micro_batches)
        stages, count = cut(config, self.schedule.stages), world // ranks
        pipelines = [list(range(i, world, count) if apart else range(i * ranks, (i + 1) * ranks)) for i in range(count)]
        self.rank = next(members.index(rank) for members in pipelines if rank in members)
        channels = Channels(set(messages(self.schedule).order), pipelines, 60.0, DEVICE) if ranks > 1 else None
        mine = [unit for stage in self.schedule.stages_of(self.rank) for unit in stages[stage]]
        self.model = build(config, precision, Share.of_units(config, mine, experts))
        self.sums = LossSums(config.num_nextn_predict_layers, DEVICE)
        self.executor = Executor(
            self.schedule, self.rank, self.model, stages, dispatcher or LocalDispatcher(), channels, **options
        )


def together(of_ranks: list[dict]) -> dict:
    """The ranks' results added up by name: what the reductions of a step give."""
    whole = {"losses": sum(one["losses"] for one in of_ranks), "grads": {}, "loads": {}}
    for key in ("grads", "loads"):
        for one in of_ranks:
            for name, tensor in one[key].items():
                whole[key][name] = whole[key][name] + tensor if name in whole[key] else tensor
    return whole
