"""Which number formats a run uses: the compute type of matrices, and the type of gradients and masters."""

from dataclasses import dataclass, replace

import torch

from dstrain.config.errors import InputError
from dstrain.precision.fp8_gemm import GemmBackend, backend
from dstrain.precision.widen import at_least_fp32

__all__ = ["PRECISIONS", "Precision", "at_least_fp32", "has_bf16", "resolve_precision"]


@dataclass(frozen=True)
class Precision:
    """`compute`: weights in GEMMs, activations, communication. `main`: main_grad, masters, reductions."""

    name: str
    compute: torch.dtype
    main: torch.dtype
    fp8: GemmBackend | None = None  # what the FP8 products run on


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32, torch.float32),
    "bf16": Precision("bf16", torch.bfloat16, torch.float32),
    "fp64": Precision("fp64", torch.float64, torch.float64),
}


def resolve_precision(
    name: str, device: torch.device, fp8_backend: str = "auto", fp8_scales: str = "power_of_two"
) -> Precision:
    """The precision called `name`; `auto` is bf16 where the device has the instructions, else fp32.

    fp8_backend, fp8_scales: of precision=fp8 alone, see `fp8_gemm.backend`.
    """
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp32"
    if name == "fp8":
        return replace(PRECISIONS["bf16"], name=name, fp8=backend(fp8_backend, device, fp8_scales == "power_of_two"))
    if name not in PRECISIONS:
        raise InputError(f"precision.name={name!r}: valid are auto, {', '.join(PRECISIONS)}, fp8")
    return PRECISIONS[name]


def has_bf16(device: torch.device) -> bool:
    """Whether `device` multiplies BF16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
