"""The inner loop that the FP8 products share: one 128x128 tile of C = A Bᵀ with scales per 128 of K."""

import triton
import triton.language as tl

TILE = 128  # rows and columns of a tile of C, and the depth after which partial products are promoted
WARPS = 8  # with 4, the two 128x128 FP32 accumulators do not fit into the registers
STAGES = 4  # 32 KiB each; the registers leave room for one program on a multiprocessor, so shared memory is free


@triton.jit
def tile_product(
    a, a_scales, a_rows, a_stride, a_scale_row, a_scale_k,
    b, b_scales, b_rows, b_stride, b_scale_row, b_scale_k,
    k_size, B_PER_ROW: tl.constexpr,
):
    """Σ over blocks k of 128: (A[:, k] B[:, k]ᵀ) · a_scales[:, k] · b_scales[:, k], FP32 [128, 128].

    `a`, `b` and their scales point at the tile's first row and at K = 0; of the 128 rows only the first a_rows and
    b_rows exist. One scale of B for all 128 rows, or one per row if B_PER_ROW. The tensor cores sum 128 products
    with less than FP32's mantissa; the sum over blocks is FP32 (arXiv 2412.19437 §3.3.2).
    """
    row = tl.arange(0, 128)
    depth = tl.arange(0, 128)
    a_in, b_in = row < a_rows, row < b_rows
    a_tile = a + row[:, None] * a_stride + depth[None, :]
    b_tile = b + row[:, None] * b_stride + depth[None, :]
    a_scale_tile = a_scales + row * a_scale_row
    if B_PER_ROW:
        two = tl.arange(0, 2)[None, :]
        b_scale_tile = b_scales + row[:, None] * b_scale_row + two
        b_scale_in = b_in[:, None] & (two == 0)
    total = tl.zeros((128, 128), tl.float32)
    for k in range(0, k_size, 128):
        inside = depth < k_size - k
        a_block = tl.load(a_tile + k, mask=a_in[:, None] & inside[None, :], other=0.0)
        b_block = tl.load(b_tile + k, mask=b_in[:, None] & inside[None, :], other=0.0)
        a_scale = tl.load(a_scale_tile + (k // 128) * a_scale_k, mask=a_in, other=0.0)
        partial = tl.dot(a_block, tl.trans(b_block))
        if B_PER_ROW:
            # One scale a thread, spread through shared memory by the sum (of itself and a zero). A plain load would be
            # made in the layout of the columns, 32 scales and 32 addresses a thread, and spill.
            pair = tl.load(b_scale_tile + (k // 128) * b_scale_k, mask=b_scale_in, other=0.0)
            b_scale = tl.sum(pair, axis=1)
            total += partial * (a_scale[:, None] * b_scale[None, :])
        else:
            b_scale = tl.load(b_scales + (k // 128) * b_scale_k)
            total += partial * (a_scale * b_scale)[:, None]
    return total


@triton.jit
def write_tile(tile, c, rows, columns, stride, ACCUMULATE: tl.constexpr):
    """Store the part of a [128, 128] tile that exists, cast to C's type, or add it to C. `c` points at its corner."""
    row, column = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    place = c + row * stride + column
    inside = (row < rows) & (column < columns)
    if ACCUMULATE:
        tile += tl.load(place, mask=inside, other=0.0)
    tl.store(place, tile.to(c.dtype.element_ty), mask=inside)


@triton.jit
def tile_of(program, tiles_m, tiles_n):
    """Program number -> tile (m, n), in bands of 8 rows of tiles, so that neighbours share operands in the L2 cache."""
    band = program // (8 * tiles_n)
    height = min(8, tiles_m - 8 * band)
    within = program - band * 8 * tiles_n
    return 8 * band + within % height, within // height
