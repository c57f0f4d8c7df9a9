"""Checkpoints and Hugging Face folders of random small models, written and read through the commands."""

from pathlib import Path

import torch
import yaml
from small_models import build

from dstrain.checkpoint.hf_export import export_folder
from dstrain.checkpoint.hf_import import import_folder, run_config
from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.tensors import load_tensors, tensor_names
from dstrain.checkpoint.weights import load_converted
from dstrain.config.schema import ExportConfig, ImportConfig, ModelConfig
from dstrain.model.model import Model
from dstrain.precision.main_grad import attach_main_grads


def write_checkpoint(root: Path, config: ModelConfig, dtype=torch.float32, files=None, extra=None, seed=3) -> Path:
    """A checkpoint of a model with the oracle's random weights; `extra` tensors and `files` beside them."""
    model, _ = build(config, dtype, seed)
    store = CheckpointStore(root, keep=2)
    plain = run_config(config, root)
    all_files = {"config.yaml": yaml.safe_dump(plain).encode(), **(files or {})}
    store.save(1, {**model.state_dict(), **(extra or {})}, {"format": 1}, all_files)
    assert store.wait() is None
    return store.newest()


def export(checkpoint: Path, out: Path, dtype="fp32", **keys) -> Path:
    assert export_folder(ExportConfig(str(checkpoint), str(out), dtype, **keys)) == 0
    return out


def import_(folder: Path, out: Path) -> Path:
    assert import_folder(ImportConfig(str(folder), str(out))) == 0
    return out


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint."""
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_names(checkpoint).items()}
    load_tensors(checkpoint, into)
    return into


def model_of(checkpoint: Path, dtype: torch.dtype) -> Model:
    """The model of a checkpoint, as its own config.yaml says."""
    plain = yaml.safe_load(CheckpointStore.file(checkpoint, "config.yaml"))
    from dstrain.config.build import build as build_config

    model = Model(build_config(ModelConfig, plain["model"]), dtype)
    load_converted(checkpoint, model.state_dict(), prefixes=("model.", "lm_head."))
    attach_main_grads(model, dtype)
    return model


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, by the safetensors library."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
