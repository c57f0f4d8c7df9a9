"""The rule of what is computed in FP32."""

import torch


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """`x` in FP32, or as it is when wider: what the paper computes in FP32 stays FP64 under precision=fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
