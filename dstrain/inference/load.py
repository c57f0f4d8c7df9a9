"""A trained model from a run folder or a checkpoint folder, ready to decode."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dstrain.checkpoint.find import find_checkpoint
from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.weights import load_weights_of
from dstrain.config.run_files import load_train_config
from dstrain.config.schema import TrainConfig
from dstrain.data.tokenizer import Tokenizer
from dstrain.model.model import Model
from dstrain.precision.policy import resolve_precision


@dataclass
class Loaded:
    model: Model
    tokenizer: Tokenizer
    config: TrainConfig  # of the run that trained it
    path: Path  # the checkpoint


def load_model(
    where: str, precision: str, device: torch.device, report: Callable[[str], None], weights: str = "final",
    compiled: bool = False,
) -> Loaded:
    """The model of checkpoint `where` in `precision` on `device`, every weight read from it.

    weights: final, or ema for their average. compiled: see `Model.freeze`.
    """
    model, config, path = load_weights(where, precision, device, report, weights, compiled)
    tokenizer = Tokenizer(CheckpointStore.file(path, "tokenizer.json").decode(), f"{path}: tokenizer.json")
    return Loaded(model, tokenizer, config, path)


def load_weights(
    where: str, precision: str, device: torch.device, report: Callable[[str], None], weights: str = "final",
    compiled: bool = False,
) -> tuple[Model, TrainConfig, Path]:
    """As `load_model`, of a checkpoint that need not have a tokenizer. -> model, the run's configuration, checkpoint."""
    path = find_checkpoint(where, report)
    config = load_train_config(CheckpointStore.file(path, "config.yaml").decode())
    chosen = resolve_precision(precision, device)
    with device:
        model = Model(config.model, chosen.compute, fp8=chosen.fp8)
    load_weights_of(path, model.state_dict(), weights)
    return model.freeze(compiled), config, path
