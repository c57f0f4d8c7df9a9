"""The whole model, experts on 2 and 4 ranks, against one process with all sequences, in float64 (FAULTS A02, B12).

The right values are that process's losses, loads and gradients. Each rank adds up its own tokens; nothing is averaged.
"""

from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from oracle import tiny_config
from ranks import spawn
from small_models import ALPHA, MTP_WEIGHT, build, run

from dstrain.model.batch import MicroBatch
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.share import Share
from dstrain.model.unit import list_units
from dstrain.model.units import forward_backward
from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.dispatch_nodes import NodeLimitedDispatcher
from dstrain.parallel.payload import PAYLOADS
from dstrain.precision.main_grad import attach_main_grads

CPU, COMPUTE = torch.device("cpu"), PAYLOADS["compute"]
SEQUENCES = [2, 2, 1, 2]  # of each rank


def force_to_the_first_half(model: Model) -> None:
    """Every token picks among experts 0 … 3: all on rank 0 of 2, on ranks 0 and 1 of 4."""
    for router in model.routers:
        router.e_score_correction_bias[:4] += 100


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


@cache
def one_process(forced: bool):
    config = tiny_config()
    whole, weights = build(config, torch.float64)
    if forced:
        force_to_the_first_half(whole)
    return whole, weights, *run(whole, config, *sample_all(), True)


def compare(rank: int, dispatcher, ep: int, forced: bool, recompute: bool) -> None:
    config, (tokens, documents) = tiny_config(), sample_all()
    whole, weights, right, counts = one_process(forced)
    grads = {name: p.main_grad for name, p in whole.named_parameters()}

    first = rank % ep * 8 // ep
    experts = range(first, first + 8 // ep)
    model = Model(config, torch.float64, Share.of_units(config, list_units(config), experts))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name][experts.start : experts.stop] if is_expert(name) else weights[name])
    attach_main_grads(model, torch.float64)
    if forced:
        force_to_the_first_half(model)
    mine = slice(sum(SEQUENCES[:rank]), sum(SEQUENCES[: rank + 1]))
    batch = MicroBatch(tokens[mine], documents[mine], config.num_nextn_predict_layers, True)
    loss_weights = LossWeights.of_batch(counts, len(tokens), MTP_WEIGHT, config.depth_weights, ALPHA)
    sums = LossSums(config.num_nextn_predict_layers, CPU)
    forward_backward(model, batch, dispatcher, sums, loss_weights, recompute)

    for tensor in (sums.depths, sums.balance, *(router.load for router in model.routers)):
        dist.all_reduce(tensor)
    torch.testing.assert_close((sums.depths, sums.balance), (right.depths, right.balance), rtol=1e-13, atol=0)
    assert all(torch.equal(a.load, b.load) for a, b in zip(model.routers, whole.routers))
    idle = 0
    for name, parameter in model.named_parameters():
        expected, grad = grads[name], parameter.main_grad
        if is_expert(name):
            expected = expected[experts.start : experts.stop]
            # The same experts are on 4 / ep ranks; no other rank adds to them.
            copies = [torch.zeros_like(grad) for _ in range(4)]
            dist.all_gather(copies, grad)
            grad = sum(copies[rank % ep :: ep])
            idle += int((grad.flatten(1) == 0).all(1).sum())
        else:
            dist.all_reduce(grad)
        error = (grad - expected).abs().max() / expected.abs().max().clamp_min(1e-300)
        assert error <= 1e-12, (name, error, ep, forced)
    if forced:
        assert idle == 3 * 4 * sum(expert >= 4 for expert in experts)  # gate, up, down in 4 layers: zeros, not missing


def sample_all():
    generator = torch.Generator().manual_seed(11)
    shape = (sum(SEQUENCES), 16 + 1 + 2)
    return (
        torch.randint(0, 61, shape, generator=generator),
        (torch.rand(shape, generator=generator) < 0.2).long().cumsum(1),
    )


def layouts(rank: int, size: int) -> None:
    world = dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    two = AllToAllDispatcher(pairs[rank // 2], 2, COMPUTE, CPU)
    four = AllToAllDispatcher(world, 2, COMPUTE, CPU, alignment=8)
    nodes = NodeLimitedDispatcher(world, 2, COMPUTE, CPU, timedelta(seconds=60))
    for dispatcher, ep in ((two, 2), (four, 4), (nodes, 4)):
        for forced in (False, True):
            compare(rank, dispatcher, ep, forced, recompute=forced)


def test_losses_loads_and_every_gradient_equal_those_of_one_process():
    spawn(layouts, 4, timeout=100)
