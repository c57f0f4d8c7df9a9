"""What the FP8 backends of a GPU make, as shapes: for a rehearsal on tensors without data, no choice of a run.

Quantisers give the Triton kernels' layouts, an expert's columns filled up to whole tiles, and what lies between
products is fused with them; products add to their result in place. Two copies of a weight, for Fprop and Dgrad, are
kept in E4M3.
"""

import torch

from dstrain.precision.fp8_blocks import scale_shape
from dstrain.precision.fp8_gemm import GemmBackend, Scaled
from dstrain.precision.fp8_scales import FP8, TILE
from dstrain.precision.fp8_tiles import column_tiles


class Shapes(GemmBackend):
    name = "shapes"

    @classmethod
    def require(cls, device: torch.device) -> None:
        """Every device will do."""

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        return a.codes.new_empty(len(a.codes), len(b.codes), dtype=dtype)

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        _agree(a, b, out.shape)

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return a.codes.new_empty(len(a.codes), b.codes.shape[1], dtype=dtype)

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        _agree(a, b, out.shape[1:])

    def quantize_rows(self, x: torch.Tensor) -> Scaled:
        return _scaled(x, x.shape, (len(x), -(-x.shape[1] // TILE)))

    def quantize_columns(self, x: torch.Tensor, offsets: torch.Tensor | None) -> Scaled:
        rows, cols = x.shape
        tiles = column_tiles(rows, offsets)
        return _scaled(x, (cols, rows if offsets is None else TILE * tiles), (cols, tiles))

    def requantize_columns(self, x: Scaled, offsets: torch.Tensor | None) -> Scaled:
        return self.quantize_columns(x.codes, offsets)

    def dequantize_rows(self, x: Scaled, dtype: torch.dtype) -> torch.Tensor:
        return x.codes.new_empty(x.codes.shape, dtype=dtype)

    def quantize_e5m6(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, cols = x.shape
        return (x.new_empty(rows, 3 * -(-cols // 2), dtype=torch.uint8),
                x.new_empty(rows, -(-cols // TILE), dtype=torch.float32))

    def e5m6_to_columns(self, packed: torch.Tensor, scale: torch.Tensor, cols: int) -> Scaled:
        return self.quantize_columns(packed.new_empty(len(packed), cols, dtype=torch.float32), None)

    def quantize_weight(self, weight: torch.Tensor) -> tuple[Scaled, Scaled]:
        turned = weight.mT.shape
        return _scaled(weight, weight.shape, scale_shape(weight.shape)), _scaled(weight, turned, scale_shape(turned))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, keep: bool) -> tuple[Scaled, torch.Tensor]:
        return self.quantize_rows(x), x.new_empty(len(x), 1, dtype=torch.float32)

    def swiglu(self, gate, up, weight, keep):
        inputs = (self.quantize_rows(gate), self.quantize_rows(up)) if keep else None
        return self.quantize_rows(gate), inputs

    def swiglu_backward(self, grad, gate, up, weight, offsets):
        grads = (self.quantize_both(grad, offsets) for _ in range(2))
        return self.quantize_columns(grad, offsets), *grads, None if weight is None else torch.empty_like(weight)


def _scaled(like: torch.Tensor, codes: tuple[int, ...], scale: tuple[int, ...]) -> Scaled:
    return Scaled(like.new_empty(codes, dtype=FP8), like.new_empty(scale, dtype=torch.float32))


def _agree(a: Scaled, b: Scaled, shape: tuple[int, ...]) -> None:
    if (len(a.codes), len(b.codes)) != tuple(shape) or a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(f"operands {list(a.codes.shape)} and {list(b.codes.shape)} for a gradient {list(shape)}")
