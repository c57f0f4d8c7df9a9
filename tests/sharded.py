"""One training state over several ranks with gradients that are made up, and what one process makes of the same.

A gradient is a sum of whole numbers over the ranks of its replica group, so the sum is exact in any order and every
layout must give the single process's weights and moments bit for bit.
"""

import hashlib

import torch
from layouts import CONFIG

from dstrain.config.schema import OptimConfig
from dstrain.model.model import Model
from dstrain.precision.main_grad import attach_main_grads
from dstrain.precision.policy import PRECISIONS
from dstrain.train.optimizer import AdamW
from dstrain.train.state import initialise

SEED, UPDATES, LEARNING_RATE, GRAD_SCALE = 7, 3, 1e-2, 2.0**-12


def build(replicas=None, precision="fp64", moments="fp32", bucket=4000):
    chosen = PRECISIONS[precision]
    model = Model(CONFIG, chosen.compute, None if replicas is None else replicas.share)
    attach_main_grads(model, chosen.main)
    return model, AdamW(model, OptimConfig(moments=moments), chosen, replicas, bucket)


def whole_shapes():
    with torch.device("meta"):
        return {name: p.shape for name, p in Model(CONFIG, torch.float32).named_parameters()}


SHAPES = whole_shapes()


def whole_numbers(name, update, member):
    digest = hashlib.sha256(f"{name}/{update}/{member}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))
    return torch.randint(-999, 1000, SHAPES[name], generator=generator).double()


def contribution(name, update, member=0, members=1):
    """What one of `members` ranks adds to the gradient, of the whole parameter; all together do not depend on them."""
    if member < members - 1:
        return whole_numbers(name, update, member + 1)
    return whole_numbers(name, update, 0) - sum(whole_numbers(name, update, m) for m in range(1, members))


def local(replicas, name, whole):
    """A rank's part of a whole parameter, or of anything of its shape."""
    part = replicas.share.experts if ".mlp.experts." in name else range(len(whole))
    return whole[part.start : part.stop]


def add_gradients(model, optimizer, update):
    replicas = optimizer.replicas
    for name, parameter in model.named_parameters():
        group = replicas.group(name)
        parameter.main_grad += local(replicas, name, contribution(name, update, group.index, group.size))


def true_norm(update):
    return torch.stack([contribution(name, update).norm() for name in SHAPES]).norm().item()


def single(**kinds):
    """The single process after UPDATES updates: model and optimizer."""
    model, optimizer = build(**kinds)
    initialise(model, optimizer, SEED)
    for update in range(1, UPDATES + 1):
        add_gradients(model, optimizer, update)
        optimizer.step(LEARNING_RATE, update, GRAD_SCALE)
    for number, router in enumerate(model.routers):
        router.e_score_correction_bias.copy_(torch.arange(8.0) + number)
    return model, optimizer


def tree(model, optimizer):
    """Everything of a single process, whole and by name: weights and biases, masters, moments."""
    result = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, state in optimizer.states.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            result[f"{kind}.{name}"] = getattr(state, kind).clone()
    return result


def check_equal(model, optimizer, wanted):
    """Assert that this rank's weights, biases and ranges of optimizer state are bit for bit those of a `tree`."""
    replicas = optimizer.replicas
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, local(replicas, name, wanted[name])), name
    for name, state in optimizer.states.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            flat = local(replicas, name, wanted[f"{kind}.{name}"].view(SHAPES[name])).reshape(-1)
            assert torch.equal(getattr(state, kind), flat[state.first : state.end]), f"{kind}.{name}"


def equal_trees(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def overwrite(model, optimizer, value):
    """Fill everything that a load must set, so that what it leaves shows."""
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    for state in optimizer.states.values():
        for flat in (state.master, state.exp_avg, state.exp_avg_sq):
            flat.fill_(value)



def numbered(**kinds):
    """A single process whose every value says where it belongs: a function of its index and its kind."""
    model, optimizer = build(**kinds)
    for name, state in optimizer.states.items():
        index = torch.arange(state.parameter.numel(), dtype=torch.float64)
        optimizer.set_weight(name, index / 7)
        state.exp_avg.copy_(-index - 0.5)
        state.exp_avg_sq.copy_(index * index)
    for number, router in enumerate(model.routers):
        router.e_score_correction_bias.copy_(torch.arange(8.0) + 100 * number)
    return model, optimizer


def take(model, optimizer, wanted):
    """Fill a rank's part of everything from a `tree`."""
    replicas = optimizer.replicas
    for name, tensor in model.state_dict().items():
        tensor.copy_(local(replicas, name, wanted[name]))
    for name, state in optimizer.states.items():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            flat = local(replicas, name, wanted[f"{kind}.{name}"].view(SHAPES[name])).reshape(-1)
            getattr(state, kind).copy_(flat[state.first : state.end])
