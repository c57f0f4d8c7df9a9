"""FP8 products on any device: the operands dequantised, then ordinary products.

A code times a power of two is exact in BF16 (4 significant bits of 8), so with power-of-two scales a BF16 product with
FP32 accumulation has the very operands of the FP8 one. FP32 scales are not exact in BF16: FP32 products then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dstrain.precision import e5m6, fp8_blocks, fp8_tiles, gemm
from dstrain.precision.fp8_gemm import GemmBackend, Scaled


class Emulated(GemmBackend):
    """Operands that nobody keeps as codes are rounded to E4M3 and back in one pass: `Scaled(values, None)`.

    Strides do not matter here, so no transpose is copied.
    """

    name = "emulated"

    def __init__(self, power_of_two: bool = True):
        super().__init__(power_of_two)
        self._bounds: dict[bool, tuple] = {}

    @classmethod
    def require(cls, device: torch.device) -> None:
        """Every device will do."""

    @property
    def exact(self) -> torch.dtype:
        """The narrowest type that holds operands exactly."""
        return torch.bfloat16 if self.power_of_two else torch.float32

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.promote_types(self.exact, dtype)
        return gemm.fprop(self._rows(a, wide), self.dequantize_weight(b, wide)).to(dtype)

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        left, right = (self._columns(x, None, out.dtype) for x in (a, b))
        with bf16_products(self.power_of_two):
            out.addmm_(left, right.t())

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.promote_types(self.exact, dtype)
        return gemm.grouped_fprop(self._rows(a, wide), self.dequantize_weight(b, wide), offsets).to(dtype)

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        left, right = (self._columns(x, offsets, out.dtype) for x in (a, b))
        with bf16_products(self.power_of_two):
            for expert, rows in gemm.groups(offsets):
                out[expert].addmm_(left[:, rows], right[:, rows].t())

    def quantize_operand(self, x: torch.Tensor) -> Scaled:
        return Scaled(fp8_tiles.rounded_rows(x, self.power_of_two, self.exact), None)

    def quantize_columns(self, x: torch.Tensor, offsets: torch.Tensor | None) -> Scaled:
        return Scaled(fp8_tiles.rounded_columns(x, self._tile_bounds(x, offsets), self.power_of_two).t(), None)

    def requantize_columns(self, x: Scaled, offsets: torch.Tensor | None) -> Scaled:
        return self.quantize_columns(self.dequantize_rows(x, self.exact), offsets)

    def e5m6_to_columns(self, packed: torch.Tensor, scale: torch.Tensor, cols: int) -> Scaled:
        return self.quantize_columns(e5m6.e5m6_in_columns(packed, scale, cols, self.exact), None)

    def quantize_weight(self, weight: torch.Tensor) -> tuple[Scaled, Scaled]:
        values = fp8_blocks.rounded_blocks(weight, self.power_of_two, self.exact)
        return Scaled(values, None), Scaled(values.mT, None)

    def dequantize_weight(self, weight: Scaled, dtype: torch.dtype) -> torch.Tensor:
        if weight.scale is None:
            return weight.codes.to(dtype)
        return fp8_blocks.dequantize_blocks(*weight, dtype)

    def _rows(self, x: Scaled, dtype: torch.dtype) -> torch.Tensor:
        return x.codes.to(dtype) if x.scale is None else fp8_tiles.dequantize_rows(*x, dtype)

    def _columns(self, x: Scaled, offsets: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return x.codes.to(dtype) if x.scale is None else fp8_tiles.dequantize_columns(*x, offsets, dtype)

    def _tile_bounds(self, x: torch.Tensor, offsets: torch.Tensor | None) -> tuple:
        """`fp8_tiles.tile_bounds`, made once for the many tensors that one dispatch's offsets serve."""
        rows, known, bounds = self._bounds.get(offsets is None, (None, None, None))
        if rows != len(x) or known is not offsets or bounds[0].device != x.device:
            bounds = fp8_tiles.tile_bounds(len(x), offsets, x.device)
            self._bounds[offsets is None] = (len(x), offsets, bounds)
        return bounds


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
