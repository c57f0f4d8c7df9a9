"""Tensors without data (PyTorch's meta device) and the device that they stand for, which may not be in this machine.

Code that is one thing on a GPU and another on a CPU asks here, so that a rehearsal on such tensors takes training's
way.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_meta_is = "cpu"


def kind(device: torch.device) -> str:
    """cpu | cuda: the device's own type, or what tensors without data stand for."""
    return _meta_is if device.type == "meta" else device.type


def on_cuda(x: torch.Tensor) -> bool:
    return x.is_cuda or (x.is_meta and _meta_is == "cuda")


@contextmanager
def standing_for(device_type: str) -> Iterator[None]:
    """Inside, tensors without data stand for tensors of this type of device."""
    global _meta_is
    outer, _meta_is = _meta_is, device_type
    try:
        yield
    finally:
        _meta_is = outer
