"""RMSNorm whose result goes straight into an FP8 product: one read of x, E4M3 in 1x128 tiles out."""

import torch
import triton
import triton.language as tl

from dstrain.precision.fp8_scales import FP8, TILE
from dstrain.precision.kernels.formats import E4M3, magnitude, scale_of, to_e4m3


@triton.jit
def rms_norm_kernel(
    x, weight, codes, scales, inverse_rms, cols, tiles, eps, POWER_OF_TWO: tl.constexpr, TILES: tl.constexpr
):
    """One row, as [TILES, 128]; TILES is the number of tiles rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)[:, None]
    column = tile * 128 + tl.arange(0, 128)[None, :]
    inside = column < cols
    values = tl.load(x + row * cols + column, mask=inside, other=0.0)
    compute = values.dtype
    values = values.to(tl.float32)
    mean = tl.sum(tl.sum(values * values, axis=1, keep_dims=True), axis=0, keep_dims=True) / cols
    inverse = tl.div_rn(tl.full((1, 1), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    tl.store(inverse_rms + row + tl.zeros((1, 1), tl.int32), inverse)
    y = (values * inverse * tl.load(weight + column, mask=inside, other=0.0)).to(compute).to(tl.float32)
    scale = scale_of(tl.max(magnitude(y), axis=1, keep_dims=True), POWER_OF_TWO, E4M3)
    tl.store(codes + row * cols + column, to_e4m3(y, scale, POWER_OF_TWO), mask=inside)
    tl.store(scales + row * tiles + tile, scale, mask=tile < tiles)


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, power_of_two: bool = True
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """x [rows, n] BF16 or FP32; weight FP32 [n] -> (E4M3 [rows, n], FP32 scale [rows, ⌈n/128⌉]) of
    x / rms · weight rounded to x's type, and 1 / rms FP32 [rows, 1], rms = sqrt(mean(x²) + eps)."""
    (rows, cols), tiles = x.shape, -(-x.shape[1] // TILE)
    codes, scales = x.new_empty(rows, cols, dtype=FP8), x.new_empty(rows, tiles, dtype=torch.float32)
    inverse_rms = x.new_empty(rows, 1, dtype=torch.float32)
    if rows:
        rms_norm_kernel[(rows,)](
            x.contiguous(), weight, codes, scales, inverse_rms, cols, tiles, eps,
            POWER_OF_TWO=power_of_two, TILES=triton.next_power_of_2(tiles), num_warps=8 if cols > 4096 else 4,
        )
    return (codes, scales), inverse_rms
