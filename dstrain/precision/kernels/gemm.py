"""FP8 products with block scales, written for sm_90: C = A Bᵀ, dense (one matrix each).

A is [M, K] with a scale per row and 128 of K. B is [N, K] with a scale per 128x128 block (weights: Fprop, Dgrad) or
per row and 128 of K (Wgrad). Partial products over 128 of K are summed in FP32.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dstrain.precision.kernels.tile_product import STAGES, TILE, WARPS, tile_of, tile_product, write_tile


@triton.jit
def matmul_kernel(
    a, a_scales, b, b_scales, c, m_size, n_size, k_size,
    a_stride, a_scale_row, a_scale_k, b_stride, b_scale_row, b_scale_k, c_stride,
    B_PER_ROW: tl.constexpr, ACCUMULATE: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m_size, 128), tl.cdiv(n_size, 128))
    m, n = tile_m.to(tl.int64) * 128, tile_n.to(tl.int64) * 128
    scale_n = n if B_PER_ROW else tile_n.to(tl.int64)
    tile = tile_product(
        a + m * a_stride, a_scales + m * a_scale_row, m_size - tile_m * 128, a_stride, a_scale_row, a_scale_k,
        b + n * b_stride, b_scales + scale_n * b_scale_row, n_size - tile_n * 128, b_stride, b_scale_row, b_scale_k,
        k_size, B_PER_ROW,
    )
    write_tile(tile, c + m * c_stride + n, m_size - tile_m * 128, n_size - tile_n * 128, c_stride, ACCUMULATE)


def matmul(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor,
    *, accumulate: bool = False,
) -> None:
    """out [M, N] = A Bᵀ, or += if accumulate (then out is FP32).

    a E4M3 [M, K], a_scales FP32 [M, ⌈K/128⌉]; b E4M3 [N, K], b_scales FP32 [⌈N/128⌉ or N, ⌈K/128⌉]. The last
    dimension of a, b and out is contiguous; scales may have any strides. out is FP32 or BF16.
    """
    m, n = len(a), len(b)
    if not (m and n):
        return
    a, b = whole_16(a), whole_16(b)
    grid = (triton.cdiv(m, TILE) * triton.cdiv(n, TILE),)
    matmul_kernel[grid](
        a, a_scales, b, b_scales, out, m, n, a.shape[1],
        a.stride(0), *a_scales.stride(), b.stride(0), *b_scales.stride(), out.stride(0),
        B_PER_ROW=per_row(b_scales, n), ACCUMULATE=accumulate, num_warps=WARPS, num_stages=STAGES,
    )


def whole_16(codes: torch.Tensor) -> torch.Tensor:
    """codes E4M3 [..., K], with zeros behind where rows do not begin at whole 16 bytes, as asynchronous copies must.

    Only a K that is no multiple of 16 costs this: no model's sizes, but the number of tokens can be one.
    """
    if all(stride % 16 == 0 for stride in codes.stride()[:-1]) and codes.data_ptr() % 16 == 0:
        return codes
    return F.pad(codes.view(torch.uint8), (0, -codes.shape[-1] % 16)).view(codes.dtype)


def per_row(scales: torch.Tensor, rows: int) -> bool:
    """Whether the scales [⌈rows/128⌉ or rows, …] of a matrix belong to rows and not to blocks. (One row: the same.)"""
    return scales.shape[-2] == rows
