"""The FP8 format of weights: E4M3 values with one FP32 scale per 128x128 block (arXiv 2412.19437 §3.3; REFERENCE §3).

    weight[i, j] ≈ q[i, j] · scale_inv[i // 128, j // 128],      scale_inv = amax of the block / 448

The last blocks of a dimension that is no multiple of 128 are ragged: they hold what is left, as if padded with zeros.
`scale_inv` is the released files' name for the factor that takes E4M3 back to the weight. This is the plain PyTorch
definition, which faster kernels are compared with.
"""

import torch

from dstrain.precision.fp8_scales import FP8, TILE, rounded_e4m3, scale_of, to_e4m3
from dstrain.precision.pointwise import kernel

BLOCK = TILE


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight of `shape` [..., rows, columns]."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def quantize_blocks(weight: torch.Tensor, power_of_two: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., rows, columns], any float type -> (E4M3 of the same shape, FP32 scale_inv).

    power_of_two: scales are rounded up to powers of two (DeepSeek-V3.1), else amax / 448 as it is (V3). A block of
    zeros has scale 1, one with a NaN or an infinity NaN: the rules of `fp8_scales`.
    """
    codes, scale = _block_codes(_blocks(weight), power_of_two)
    return _weight(codes, weight.shape), scale.view(scale_shape(weight.shape))


@kernel
def _block_codes(blocks, power_of_two):
    wide = blocks.float()
    scale = scale_of(wide.abs().amax(dim=(2, 4), keepdim=True), power_of_two)
    return to_e4m3(wide, scale), scale


def dequantize_blocks(quantized: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """E4M3 [..., rows, columns], scales of `scale_shape` -> the weight in `dtype`; the product is FP32, rounded once."""
    if tuple(scale_inv.shape) != scale_shape(quantized.shape):
        raise ValueError(f"scales {list(scale_inv.shape)} do not belong to a weight {list(quantized.shape)}")
    rows, columns = scale_inv.shape[-2:]
    values = _block_values(_blocks(quantized), scale_inv.float().reshape(-1, rows, 1, columns, 1), dtype)
    return _weight(values, quantized.shape)


@kernel
def _block_values(blocks, scale_inv, dtype):
    return (blocks.float() * scale_inv).to(dtype)


def rounded_blocks(weight: torch.Tensor, power_of_two: bool, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_blocks` of `quantize_blocks`, in one pass."""
    return _weight(_block_rounded(_blocks(weight), power_of_two, dtype)[0], weight.shape)


@kernel
def _block_rounded(blocks, power_of_two, dtype):
    scale = scale_of(blocks.float().abs().amax(dim=(2, 4), keepdim=True), power_of_two)
    inverse = 1 / scale
    return rounded_e4m3(blocks, scale, inverse if power_of_two else None).to(dtype), scale, inverse


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """[..., rows, columns] -> [n, row blocks, 128, column blocks, 128], ragged blocks filled up with zeros."""
    (rows, columns), (down, across) = weight.shape[-2:], scale_shape(weight.shape)[-2:]
    if rows % BLOCK or columns % BLOCK:
        whole = weight.new_empty(*weight.shape[:-2], down * BLOCK, across * BLOCK)
        whole[..., :rows, :columns] = weight
        whole[..., rows:, :] = 0
        whole[..., :rows, columns:] = 0
        weight = whole
    return weight.reshape(-1, down, BLOCK, across, BLOCK)


def _weight(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_blocks`."""
    _, down, _, across, _ = blocks.shape
    whole = blocks.reshape(*shape[:-2], down * BLOCK, across * BLOCK)
    return whole[..., : shape[-2], : shape[-1]].contiguous()
