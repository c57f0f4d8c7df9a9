"""Tokens to the rows of their experts and back: a gather of quantised rows, and the sum of each token's rows."""

import torch
import triton
import triton.language as tl

from dstrain.precision.fp8_scales import FP8


@triton.jit
def permute_kernel(codes, scales, index, out, out_scales, cols, tiles, COLS: tl.constexpr, TILES: tl.constexpr):
    """One row of the result, in chunks of COLS bytes; its scales with the first chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(index + row).to(tl.int64)
    column = chunk * COLS + tl.arange(0, COLS)
    tl.store(out + row * cols + column, tl.load(codes + source * cols + column, mask=column < cols), mask=column < cols)
    if chunk == 0:
        tile = tl.arange(0, TILES)
        values = tl.load(scales + source * tiles + tile, mask=tile < tiles)
        tl.store(out_scales + row * tiles + tile, values, mask=tile < tiles)


def permute(codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes E4M3 [tokens, n], scales FP32 [tokens, tiles], contiguous; index int32 or int64 [rows] -> the rows
    codes[index], scales[index]."""
    rows, cols, tiles = len(index), codes.shape[1], scales.shape[1]
    out, out_scales = codes.new_empty(rows, cols, dtype=torch.uint8), scales.new_empty(rows, tiles)
    if rows and cols:
        size = min(4096, triton.next_power_of_2(cols))
        permute_kernel[(rows, triton.cdiv(cols, size))](
            codes.view(torch.uint8), scales, index, out, out_scales, cols, tiles,
            COLS=size, TILES=triton.next_power_of_2(tiles),
        )
    return out.view(FP8), out_scales


@triton.jit
def unpermute_kernel(rows, slots, out, cols, choices, COLS: tl.constexpr):
    """One token: its rows added in the order of its choices, in FP32."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for choice in range(choices):
        row = tl.load(slots + token * choices + choice).to(tl.int64)
        if row >= 0:
            total += tl.load(rows + row * cols + column, mask=column < cols, other=0.0).to(tl.float32)
    tl.store(out + token * cols + column, total.to(out.dtype.element_ty), mask=column < cols)


def unpermute(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """rows [n, hidden] BF16 or FP32; slots int [tokens, k]: the rows of a token, below 0 for none -> their sum
    [tokens, hidden] in the type of rows, added in FP32 in the order of k and rounded once."""
    (tokens, choices), cols = slots.shape, rows.shape[1]
    out = rows.new_empty(tokens, cols)
    if out.numel():
        size = min(2048, triton.next_power_of_2(cols))
        unpermute_kernel[(tokens, triton.cdiv(cols, size))](
            rows.contiguous(), slots.contiguous(), out, cols, choices, COLS=size
        )
    return out
