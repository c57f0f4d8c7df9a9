"""FP8 products of experts, written for sm_90. Nothing here needs to know on the host how many rows an expert has.

    grouped_matmul        rows of A by expert:  C[rows of e] = A[rows of e] B[e]ᵀ        (Fprop, Dgrad)
    grouped_accumulate    K by expert:          C[e] += A[:, tiles of e] B[:, tiles of e]ᵀ      (Wgrad)

Offsets are the ends of the experts' rows, int32 [experts]; experts may have no rows.
"""

import torch
import triton
import triton.language as tl

from dstrain.precision.kernels.gemm import whole_16
from dstrain.precision.kernels.tile_product import STAGES, TILE, WARPS, tile_of, tile_product, write_tile


@triton.jit
def grouped_matmul_kernel(
    a, a_scales, b, b_scales, c, offsets, experts, most_tiles, n_size, k_size,
    a_stride, a_scale_row, a_scale_k, b_expert, b_stride, b_scale_expert, b_scale_row, b_scale_k, c_stride,
    EXPERTS: tl.constexpr,
):
    """EXPERTS: experts rounded up to a power of two. most_tiles: rows of tiles if no expert's last one were shared."""
    tile_m, tile_n = tile_of(tl.program_id(0), most_tiles, tl.cdiv(n_size, 128))
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < experts, other=0)
    begins = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.where(expert < experts, tl.cdiv(ends - begins, 128), 0)
    last_tile = tl.cumsum(tiles, axis=0)  # end of each expert's tiles
    if tile_m < tl.max(last_tile, axis=0):
        mine = tl.sum((last_tile <= tile_m).to(tl.int32), axis=0)
        this = expert == mine
        row = tl.sum(tl.where(this, begins + (tile_m - last_tile + tiles) * 128, 0), axis=0)
        rows = tl.sum(tl.where(this, ends, 0), axis=0) - row
        m, n, e = row.to(tl.int64), tile_n.to(tl.int64) * 128, mine.to(tl.int64)
        columns = n_size - tile_n * 128
        tile = tile_product(
            a + m * a_stride, a_scales + m * a_scale_row, rows, a_stride, a_scale_row, a_scale_k,
            b + e * b_expert + n * b_stride, b_scales + e * b_scale_expert + tile_n * b_scale_row, columns,
            b_stride, b_scale_row, b_scale_k, k_size, False,
        )
        write_tile(tile, c + m * c_stride + n, rows, columns, c_stride, False)


def grouped_matmul(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out [rows, N], rows of expert e = A's rows of expert e times B[e]ᵀ; rows that belong to nobody stay as they are.

    a E4M3 [rows, K], a_scales FP32 [rows, ⌈K/128⌉]; b E4M3 [experts, N, K], b_scales FP32
    [experts, ⌈N/128⌉, ⌈K/128⌉]. out FP32 or BF16.
    """
    rows, (experts, n, _) = len(a), b.shape
    if not (rows and n):
        return
    a, b = whole_16(a), whole_16(b)
    most_tiles = min(rows, rows // TILE + experts)  # Σ ⌈rows of e / 128⌉ is at most this
    grid = (most_tiles * triton.cdiv(n, TILE),)
    grouped_matmul_kernel[grid](
        a, a_scales, b, b_scales, out, offsets, experts, most_tiles, n, a.shape[1],
        a.stride(0), *a_scales.stride(), *b.stride()[:2], *b_scales.stride(), out.stride(0),
        EXPERTS=triton.next_power_of_2(experts), num_warps=WARPS, num_stages=STAGES,
    )


@triton.jit
def grouped_accumulate_kernel(
    a, a_scales, b, b_scales, c, offsets, m_size, n_size,
    a_stride, a_scale_row, a_scale_k, b_stride, b_scale_row, b_scale_k, c_expert, c_stride,
):
    """One program: one tile of one expert's C, over the expert's own 128-wide tiles of K, which are whole."""
    expert = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m_size, 128), tl.cdiv(n_size, 128))
    end = tl.load(offsets + expert)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if end > begin:
        first = (begin // 128 + expert).to(tl.int64)  # the expert's first tile, as fp8_tiles counts them
        m, n, k_size = tile_m.to(tl.int64) * 128, tile_n.to(tl.int64) * 128, tl.cdiv(end - begin, 128) * 128
        rows, columns = m_size - tile_m * 128, n_size - tile_n * 128
        tile = tile_product(
            a + m * a_stride + first * 128, a_scales + m * a_scale_row + first * a_scale_k, rows,
            a_stride, a_scale_row, a_scale_k,
            b + n * b_stride + first * 128, b_scales + n * b_scale_row + first * b_scale_k, columns,
            b_stride, b_scale_row, b_scale_k, k_size, True,
        )
        write_tile(tile, c + expert.to(tl.int64) * c_expert + m * c_stride + n, rows, columns, c_stride, True)


def grouped_accumulate(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out FP32 [experts, M, N] += A Bᵀ over each expert's own K; an expert without rows adds nothing.

    a E4M3 [M, 128 · tiles], a_scales FP32 [M, tiles], b [N, 128 · tiles] likewise: the operands of
    `fp8_tiles.quantize_columns` with every tile filled up with zeros to 128 (`columns.fill_tiles`), so that each begins
    on a whole 16 bytes wherever the experts' rows end.
    """
    experts, m, n = out.shape
    grid = (triton.cdiv(m, TILE) * triton.cdiv(n, TILE), experts)
    grouped_accumulate_kernel[grid](
        a, a_scales, b, b_scales, out, offsets, m, n,
        a.stride(0), *a_scales.stride(), b.stride(0), *b_scales.stride(), *out.stride()[:2],
        num_warps=WARPS, num_stages=STAGES,
    )
