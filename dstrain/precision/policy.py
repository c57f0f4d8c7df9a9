"""Which number formats a run uses: the compute type of matrices, and the type of gradients and masters."""

from dataclasses import dataclass

import torch

from dstrain.config.errors import InputError
from dstrain.precision.widen import at_least_fp32

__all__ = ["PRECISIONS", "Precision", "at_least_fp32", "has_bf16", "resolve_precision"]


@dataclass(frozen=True)
class Precision:
    """`compute`: weights in GEMMs, activations, communication. `main`: main_grad, masters, reductions."""

    name: str
    compute: torch.dtype
    main: torch.dtype


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32, torch.float32),
    "bf16": Precision("bf16", torch.bfloat16, torch.float32),
    "fp64": Precision("fp64", torch.float64, torch.float64),
}


def resolve_precision(name: str, device: torch.device) -> Precision:
    """The precision called `name`; `auto` is bf16 where the device has the instructions, else fp32."""
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp32"
    if name not in PRECISIONS:
        raise InputError(f"precision.name={name!r}: valid are auto, {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def has_bf16(device: torch.device) -> bool:
    """Whether `device` multiplies BF16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
