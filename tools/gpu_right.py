"""The first part of `gpu_check.py`: every Triton kernel beside its definition, products beside float64."""

from collections.abc import Callable

import torch
from fp8_cases import adversarial, alike, same

from dstrain.precision import e5m6 as e5m6_definition
from dstrain.precision import fp8_blocks, fp8_tiles
from dstrain.precision.kernels import (
    blocks, definitions, e5m6, gemm, grouped_gemm, permute, rms_norm, swiglu, tiles,
)


def right(report, device: torch.device, dry: bool) -> None:
    """A line of `report` for every comparison on `device`; dry: few and small ones."""
    compare = Comparison(report)
    shapes = [(70, 130)] if dry else [(1, 1), (133, 192), (576, 7168), (2112, 1536)]
    for rows, cols in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            quantisers(compare, adversarial(rows, cols, dtype).to(device))
    fused(compare, device, *((70, 256) if dry else (4096, 2048)))
    sizes = (70, 150, 300, [5, 0, 65]) if dry else (1000, 1100, 1296, [700, 0, 300])
    for name, (result, a, b) in product_cases(device, *sizes).items():
        report.line("right", name, lambda result=result, a=a, b=b: product_error(result(), a, b))


class Comparison:
    """Compares a kernel's result with its definition's, as a line of the report."""

    def __init__(self, report):
        self.report = report

    def __call__(self, name: str, result: Callable, expected: Callable, equal: Callable = same) -> None:
        def work():
            if not equal(result(), expected()):
                raise AssertionError("differs from the definition")
            return "equal bit by bit" if equal is same else "equal but for the last bit of FP32"

        self.report.line("right", name, work)


def quantisers(compare: Comparison, x: torch.Tensor) -> None:
    rows, cols = x.shape
    name = f"{rows} x {cols} {str(x.dtype).removeprefix('torch.')}"
    offsets = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32, device=x.device)
    for power in (True, False):
        kind = f"{name}, {'power-of-two' if power else 'FP32'} scales"
        compare(
            f"1x128 tiles, {kind}", lambda: tiles.quantize_rows(x, power), lambda: fp8_tiles.quantize_rows(x, power)
        )
        compare(
            f"both orientations, {kind}", lambda: tiles.quantize_both(x, None, power),
            lambda: (fp8_tiles.quantize_rows(x, power), fp8_tiles.quantize_columns(x, None, power)),
        )
        compare(
            f"columns of experts, {kind}", lambda: tiles.quantize_columns(x, offsets, power),
            lambda: definitions.columns(x, offsets, power),
        )
        compare(
            f"128x128 blocks, {kind}", lambda: blocks.quantize_weight(x, power)[0],
            lambda: fp8_blocks.quantize_blocks(x, power),
        )
    packed = e5m6_definition.quantize_e5m6(x)
    compare(f"E5M6, {name}", lambda: e5m6.quantize_e5m6(x), lambda: packed)
    compare(
        f"E5M6 to columns, {name}", lambda: e5m6.e5m6_to_columns(*packed, cols),
        lambda: e5m6_definition.e5m6_to_columns(*packed, cols),
    )


def normal(device: torch.device, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def fused(compare: Comparison, device: torch.device, rows: int, cols: int) -> None:
    gate, up, grad = (normal(device, rows, cols, seed=seed).bfloat16() for seed in range(3))
    weight, norm = normal(device, rows, seed=3), normal(device, cols, seed=4)
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=device)
    kept = definitions.swiglu_quantize(gate, up, weight)[1:]
    compare(
        "SwiGLU", lambda: swiglu.swiglu_quantize(gate, up, weight),
        lambda: definitions.swiglu_quantize(gate, up, weight), alike,
    )
    compare(
        "SwiGLU backward", lambda: swiglu.swiglu_backward_quantize(grad, *kept, weight, offsets),
        lambda: definitions.swiglu_backward_quantize(grad, *kept, weight, offsets), alike,
    )
    compare(
        "RMSNorm", lambda: rms_norm.rms_norm_quantize(gate, norm, 1e-6),
        lambda: definitions.rms_norm_quantize(gate, norm, 1e-6), alike,
    )
    index = (torch.arange(3 * rows, device=device) * 7) % rows
    slots = index.view(rows, 3) - 1
    compare("permute", lambda: permute.permute(*kept[0], index), lambda: definitions.permute(*kept[0], index))
    compare("unpermute", lambda: permute.unpermute(gate, slots), lambda: definitions.unpermute(gate, slots))


def product_cases(device: torch.device, m: int, n: int, k: int, counts: list[int]) -> dict:
    """Name: what computes a product in FP32, and its operands in float64; counts: the rows of each expert."""
    offsets = torch.tensor(counts, device=device).cumsum(0).int()
    x, dy, weight = (normal(device, *s, seed=i) for i, s in enumerate([(m, k), (m, n), (len(counts), n, k)]))
    a, b = fp8_tiles.quantize_rows(x), fp8_blocks.quantize_blocks(weight)
    dense = [fp8_tiles.dequantize_rows(*a, torch.float64), fp8_blocks.dequantize_blocks(*b, torch.float64)]
    columns = [fp8_tiles.quantize_columns(y) for y in (dy, x)]
    by_expert = [definitions.columns(y, offsets) for y in (dy, x)]
    wide = [
        fp8_tiles.dequantize_columns(*fp8_tiles.quantize_columns(y, offsets), offsets, torch.float64) for y in (dy, x)
    ]

    def run(function, size, *arguments, **named):
        out = torch.zeros(size, device=device)
        function(*arguments, out, **named)
        return out

    parts = [list(x.split(counts, dim=1)) for x in wide]
    return {
        "product": (lambda: run(gemm.matmul, (m, n), *a, b[0][0], b[1][0]), dense[0], dense[1][0]),
        "product into FP32": (
            lambda: run(gemm.matmul, (n, k), *columns[0], *columns[1], accumulate=True),
            *(fp8_tiles.dequantize_columns(*c, None, torch.float64) for c in columns),
        ),
        "product of experts": (
            lambda: run(grouped_gemm.grouped_matmul, (m, n), *a, *b, offsets),
            list(dense[0].split(counts)), list(dense[1]),
        ),
        "product of experts into FP32": (
            lambda: run(grouped_gemm.grouped_accumulate, (len(counts), n, k), *by_expert[0], *by_expert[1], offsets),
            *parts,
        ),
    }


def product_error(result: torch.Tensor, a, b) -> tuple[str, float]:
    """The largest error in units of the sum of a result's terms' magnitudes; 1e-3 is what the tensor cores may lose."""
    if isinstance(a, list):
        pieces = result if result.ndim == 3 else result.split([len(part) for part in a])
    else:
        pieces, a, b = [result], [a], [b]
    worst = 0.0
    for piece, left, right_ in zip(pieces, a, b, strict=True):
        if piece.numel() and left.shape[1]:
            size = (left.abs() @ right_.abs().t()).clamp_min(1e-300)
            worst = max(worst, ((piece.double() - left @ right_.t()).abs() / size).max().item())
        elif piece.any():
            raise AssertionError("an expert without rows has a result")
    if not worst <= 1e-3:
        raise AssertionError(f"error {worst:.2e} of the terms' magnitudes, more than 1e-3")
    return f"error {worst:.1e} of the terms' magnitudes", worst
