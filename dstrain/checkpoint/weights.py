"""Weights in a checkpoint: their wide copies, their average, and loading one floating type into another."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dstrain.checkpoint.progress import byte_progress
from dstrain.checkpoint.reader import CheckpointReader
from dstrain.checkpoint.tensors import load_tensors, require_same, tensor_names
from dstrain.config.errors import InputError

MASTER = "optimizer.master."  # before a weight's name: its wide copy, flat, where a run keeps one
EMA = "ema."  # before the name of a weight or a routing bias: its average, flat, where a run keeps one


def load_weights_of(path: Path, into: dict[str, Tensor], weights: str) -> None:
    """Fill `into`, all weights and biases of a model, contiguous, of any float type, from the checkpoint `path`.

    weights: final, or ema for their average. InputError where the checkpoint does not hold exactly these.
    """
    if weights == "final":
        return load_converted(path, into, prefixes=("model.", "lm_head."))
    reader = CheckpointReader(path)
    require_average(reader)
    saved = {name: kind for name, kind in reader.kinds.items() if name.startswith(EMA)}
    wanted = {}
    for name, tensor in into.items():
        shape = (tensor.numel(),)
        wanted[EMA + name] = shape, saved.get(EMA + name, (shape, tensor.dtype))[1]
    require_same(path, saved, wanted)
    with byte_progress(f"loading {path.name}", sum(tensor.nbytes for tensor in into.values())) as advance:
        for name, tensor in into.items():
            reader.fill(EMA + name, tensor.view(-1))
            advance(tensor.nbytes)


def require_average(reader: CheckpointReader) -> None:
    """InputError unless the checkpoint holds the average of its weights."""
    if not any(name.startswith(EMA) for name in reader.kinds):
        raise InputError(
            f"weights=ema: checkpoint {reader.path} holds no average of its weights; valid: weights=final, or a "
            "checkpoint of a run with ema.decay"
        )


def load_converted(path: Path, into: dict[str, Tensor], prefixes: Sequence[str] = ("",)) -> None:
    """As `load_tensors`, but a tensor stored in another floating type is converted to that of its target."""
    stored = tensor_names(path)
    direct = {}
    for name, tensor in into.items():
        shape, dtype = stored.get(name, (tensor.shape, tensor.dtype))
        converts = dtype != tensor.dtype and dtype.is_floating_point and tensor.is_floating_point()
        direct[name] = torch.empty(tensor.shape, dtype=dtype) if converts else tensor
    load_tensors(path, direct, prefixes)
    for name, tensor in into.items():
        if direct[name] is not tensor:
            tensor.copy_(direct[name])
