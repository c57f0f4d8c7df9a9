"""FP8 products on any device: the operands dequantised, then ordinary products.

A code times a power of two is exact in BF16 (4 significant bits of 8), so with power-of-two scales a BF16 product with
FP32 accumulation has the very operands of the FP8 one. FP32 scales are not exact in BF16: FP32 products then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dstrain.precision import fp8_blocks, fp8_tiles, gemm
from dstrain.precision.fp8_gemm import GemmBackend, Scaled


class Emulated(GemmBackend):
    """Strides do not matter here, so what an operand is transposed from is never copied."""

    name = "emulated"

    @classmethod
    def require(cls, device: torch.device) -> None:
        """Every device will do."""

    @property
    def exact(self) -> torch.dtype:
        """The narrowest type that holds operands exactly."""
        return torch.bfloat16 if self.power_of_two else torch.float32

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.promote_types(self.exact, dtype)
        with bf16_products(self.power_of_two):
            return gemm.fprop(fp8_tiles.dequantize_rows(*a, wide), self.dequantize_weight(b, wide)).to(dtype)

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        left, right = (fp8_tiles.dequantize_columns(*x, None, out.dtype) for x in (a, b))
        with bf16_products(self.power_of_two):
            out.addmm_(left, right.t())

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.promote_types(self.exact, dtype)
        rows = fp8_tiles.dequantize_rows(*a, wide)
        with bf16_products(self.power_of_two):
            return gemm.grouped_fprop(rows, self.dequantize_weight(b, wide), offsets).to(dtype)

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        left, right = (fp8_tiles.dequantize_columns(*x, offsets, out.dtype) for x in (a, b))
        with bf16_products(self.power_of_two):
            for expert, rows in gemm.groups(offsets):
                out[expert].addmm_(left[:, rows], right[:, rows].t())

    def quantize_columns(self, x: torch.Tensor, offsets: torch.Tensor | None) -> Scaled:
        codes, scale = fp8_tiles.column_codes(x, offsets, self.power_of_two)
        return Scaled(codes.t(), scale.t())

    def requantize_columns(self, x: Scaled, offsets: torch.Tensor | None) -> Scaled:
        return self.quantize_columns(self.dequantize_rows(x, self.exact), offsets)

    def quantize_weight(self, weight: torch.Tensor) -> tuple[Scaled, Scaled]:
        """Kept dequantised, so that a step does that once."""
        values = fp8_blocks.dequantize_blocks(*fp8_blocks.quantize_blocks(weight, self.power_of_two), self.exact)
        return Scaled(values, None), Scaled(values.mT, None)

    def dequantize_weight(self, weight: Scaled, dtype: torch.dtype) -> torch.Tensor:
        if weight.scale is None:
            return weight.codes.to(dtype)
        return fp8_blocks.dequantize_blocks(*weight, dtype)


@contextmanager
def bf16_products(allowed: bool) -> Iterator[None]:
    """Inside, the CPU's FP32 products may go through BF16 instructions: nothing is lost where the operands are BF16's."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    if allowed:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
