"""The state of a run as one tree: tensors by name, and a few integers. What a checkpoint holds is exactly this."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dstrain.checkpoint.tensors import tensor_names
from dstrain.checkpoint.weights import MASTER, load_converted
from dstrain.config.schema import ModelConfig, TrainConfig
from dstrain.model.init import initial_value
from dstrain.model.model import Model
from dstrain.precision.main_grad import attach_main_grads
from dstrain.precision.policy import Precision
from dstrain.train.optimizer import AdamW

EXP_AVG, EXP_AVG_SQ = "optimizer.exp_avg.", "optimizer.exp_avg_sq."
RNG = "rng.cpu"


@dataclass
class RunState:
    """step: attempted optimizer steps. samples: consumed. updates and tokens: of the steps that were applied."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    def to_meta(self) -> dict:
        return asdict(self)


def build_state(config: TrainConfig, precision: Precision, device: torch.device) -> tuple[Model, AdamW]:
    """The model on `device` with its gradients, and its optimizer. Weights are not set yet: `initialise` or `restore`."""
    with device:
        model = Model(config.model, precision.compute, fp8=precision.fp8)
    attach_main_grads(model, precision.main)
    return model, AdamW(model, config.optim, precision)


def run_tensors(model: Model, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Every tensor of the run: weights and biases under Hugging Face's names, flat optimizer state, RNG."""
    tensors = dict(model.state_dict())
    for name, state in optimizer.states.items():
        if state.has_master:
            tensors[MASTER + name] = state.master
        tensors[EXP_AVG + name] = state.exp_avg
        tensors[EXP_AVG_SQ + name] = state.exp_avg_sq
    tensors[RNG] = torch.get_rng_state()
    return tensors


def initialise(model: Model, optimizer: AdamW, seed: int) -> None:
    """Initial weights by (seed, name); biases are 0 already."""
    for name, state in optimizer.states.items():
        value = initial_value(name, state.parameter.shape, model.config, seed, state.master.dtype)
        optimizer.set_weight(name, value)


def restore(model: Model, optimizer: AdamW, path: Path) -> None:
    """Fill model, optimizer and RNG from the checkpoint at `path`, which may have been written in another precision."""
    weights = model.state_dict()
    others = {
        name: tensor
        for name, tensor in run_tensors(model, optimizer).items()
        if name not in weights and not name.startswith(MASTER)
    }
    load_weights(model, optimizer, path, list(weights), others)
    torch.set_rng_state(others[RNG])


def load_weights(
    model: Model,
    optimizer: AdamW,
    path: Path,
    names: list[str],
    others: dict[str, torch.Tensor],
    prefixes: Sequence[str] = ("",),
) -> None:
    """Fill the weights and biases `names` with their masters, and the tensors `others`, from the checkpoint at `path`.

    Together these must be all the tensors there that begin with one of `prefixes`. Weights may be of any float type.
    """
    stored, weights = tensor_names(path), model.state_dict()
    tensors = {**others, **{name: weights[name] for name in names}}
    trained = [name for name in names if name in optimizer.states]
    for name in trained:
        # A master is stored only where the weight was narrower, and then it is the truth and the weight its rounding;
        # else the weight fills the master, which keeps whatever precision it was stored in.
        master = optimizer.states[name].master
        if MASTER + name in stored:
            tensors[name] = torch.empty(weights[name].shape, dtype=weights[name].dtype)
            tensors[MASTER + name] = master
        else:
            tensors[name] = master.view(weights[name].shape)
    load_converted(path, tensors, prefixes)
    for name in trained:
        optimizer.set_weight(name, optimizer.states[name].master)


def architecture(config: ModelConfig) -> dict:
    """What must agree for a checkpoint to belong to a model."""
    free = {"name", "mtp_depth_weights", "rope_scaling", "max_position_embeddings", "initializer_range"}
    return {key: value for key, value in asdict(config).items() if key not in free}
