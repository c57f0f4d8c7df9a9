"""Weights in a checkpoint: their wide copies, and loading one floating type into another."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dstrain.checkpoint.tensors import load_tensors, tensor_names

MASTER = "optimizer.master."  # before a weight's name: its wide copy, flat, where a run keeps one


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
