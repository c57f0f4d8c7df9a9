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
    name = "emulated"

    @classmethod
    def require(cls, device: torch.device) -> None:
        """Every device will do."""

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        wide = self._operand_type(dtype)
        left, right = fp8_tiles.dequantize_rows(*a, wide), fp8_blocks.dequantize_blocks(*b, wide)
        with exact_bf16_products(self.power_of_two):
            return gemm.fprop(left, right).to(dtype)

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        left, right = (fp8_tiles.dequantize_rows(*x, torch.float32) for x in (a, b))
        with exact_bf16_products(self.power_of_two):
            out.addmm_(left, right.t())

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = self._operand_type(dtype)
        left, right = fp8_tiles.dequantize_rows(*a, wide), fp8_blocks.dequantize_blocks(*b, wide)
        with exact_bf16_products(self.power_of_two):
            return gemm.grouped_fprop(left, right, offsets).to(dtype)

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        left, right = (fp8_tiles.dequantize_columns(*x, offsets, torch.float32) for x in (a, b))
        with exact_bf16_products(self.power_of_two):
            gemm.grouped_wgrad(left.t(), right.t(), offsets, out)

    def _operand_type(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.power_of_two and dtype == torch.bfloat16 else torch.float32


@contextmanager
def exact_bf16_products(allowed: bool) -> Iterator[None]:
    """Inside, the CPU's FP32 products may take their operands, exact in BF16, through BF16 instructions."""
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    if allowed:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
