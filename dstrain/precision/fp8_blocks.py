"""The FP8 format of weights: E4M3 values with one FP32 scale per 128x128 block (arXiv 2412.19437 §3.3; REFERENCE §3).

    weight[i, j] ≈ q[i, j] · scale_inv[i // 128, j // 128],      scale_inv = amax of the block / 448

The last blocks of a dimension that is no multiple of 128 are ragged: they hold what is left, as if padded with zeros.
`scale_inv` is the released files' name for the factor that takes E4M3 back to the weight. This is the plain PyTorch
definition, which faster kernels are compared with.
"""

import torch

from dstrain.precision.fp8_scales import E4M3_MAX, FP8, TILE, scale_of, to_e4m3
from dstrain.precision.pointwise import kernel

BLOCK = TILE


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight of `shape` [..., rows, columns]."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


@kernel
def quantize_blocks(weight: torch.Tensor, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., rows, columns], any float type -> (E4M3 of the same shape, FP32 scale_inv).

    power_of_two: scales are rounded up to powers of two (DeepSeek-V3.1), else amax / 448 as it is (V3). A block of
    zeros has scale 1, one with a NaN or an infinity NaN: the rules of `fp8_scales`.
    """
    blocks = _blocks(weight.float())
    scale = scale_of(blocks.abs().amax(dim=(-3, -1)), power_of_two)  # [..., row blocks, column blocks]
    return _weight(to_e4m3(blocks, scale[..., :, None, :, None]), weight.shape), scale


def dequantize_blocks(quantized: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 [..., rows, columns], scales of `scale_shape` -> the weight in `dtype`; the product is FP32, rounded once."""
    if tuple(scale_inv.shape) != scale_shape(quantized.shape):
        raise ValueError(f"scales {list(scale_inv.shape)} do not belong to a weight {list(quantized.shape)}")
    return block_values(quantized, scale_inv, dtype)


@kernel
def block_values(quantized, scale_inv, dtype):
    blocks = _blocks(quantized.float()) * scale_inv.float()[..., :, None, :, None]
    return _weight(blocks.to(dtype), quantized.shape)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] -> [..., row blocks, 128, column blocks, 128], ragged blocks filled up with zeros."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))


def _weight(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_blocks`."""
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]].contiguous()
