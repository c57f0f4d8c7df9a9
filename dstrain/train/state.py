"""The state of a run as one tree: tensors by name, and a few integers. What a checkpoint holds is exactly this."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dstrain.checkpoint.tensors import tensor_names
from dstrain.checkpoint.weights import load_converted
from dstrain.config.schema import ModelConfig
from dstrain.model.init import initial_value
from dstrain.model.model import Model
from dstrain.train.optimizer import AdamW

MASTER, EXP_AVG, EXP_AVG_SQ = "optimizer.master.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."
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
    stored = tensor_names(path)
    tensors = {name: tensor for name, tensor in run_tensors(model, optimizer).items() if not name.startswith(MASTER)}
    # A master is stored only where the weight was narrower, and then it is the truth and the weight its rounding.
    masters = [name for name in optimizer.states if MASTER + name in stored]
    for name in masters:
        tensors[name] = torch.empty(tensors[name].shape, dtype=tensors[name].dtype)
        tensors[MASTER + name] = optimizer.states[name].master
    load_converted(path, tensors)
    for name, state in optimizer.states.items():
        optimizer.set_weight(name, state.master if name in masters else state.parameter.detach())
    torch.set_rng_state(tensors[RNG])


def architecture(config: ModelConfig) -> dict:
    """What must agree for a checkpoint to belong to a model."""
    free = {"name", "mtp_depth_weights", "rope_scaling", "max_position_embeddings", "initializer_range"}
    return {key: value for key, value in asdict(config).items() if key not in free}
