"""The device a process computes on."""

import torch

from dstrain.config.errors import InputError


def pick_device(name: str, key: str = "run.device") -> torch.device:
    """auto | cpu | cuda -> the device; `key` is named in the error when there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{key}=cuda: torch finds no CUDA device here; valid: auto, cpu")
    if name not in ("cpu", "cuda"):
        raise InputError(f"{key}={name}: valid are auto, cpu, cuda")
    return torch.device(name)
