"""FP8 products and quantisers of this package's own Triton kernels, written for Hopper (sm_90).

Verified: in Triton's interpreter, products against float64 and quantisers bit by bit against the definitions; compiled
for sm_90 ahead of time (E4M3 warp-group products, no spills). Not yet run on a GPU: `tools/gpu_check.py` does that.
"""

import torch

from dstrain.precision.backends.requirements import require_hopper, require_package
from dstrain.precision.fp8_gemm import GemmBackend, Scaled


class KernelQuantizers(GemmBackend):
    """A backend whose quantisers are the Triton kernels, which equal the definitions bit by bit.

    The columns of experts come with their tiles filled up to 128, [cols, 128 · tiles] (`kernels.tiles.fill_tiles`);
    `filled` brings the definitions' own layout into that.
    """

    def __init__(self, power_of_two: bool = True):
        super().__init__(power_of_two)
        # Here and not above: without Triton, this module must still be importable to say that it is missing.
        from dstrain.precision.kernels import blocks, e5m6, rms_norm, swiglu, tiles

        self.blocks, self.e5m6, self.norm, self.fused_swiglu, self.tiles = blocks, e5m6, rms_norm, swiglu, tiles

    def quantize_rows(self, x: torch.Tensor) -> Scaled:
        return Scaled(*self.tiles.quantize_rows(x, self.power_of_two))

    def quantize_columns(self, x: torch.Tensor, offsets: torch.Tensor | None) -> Scaled:
        return Scaled(*self.tiles.quantize_columns(x, offsets, self.power_of_two))

    def quantize_both(self, x: torch.Tensor, offsets: torch.Tensor | None) -> tuple[Scaled, Scaled]:
        rows, columns = self.tiles.quantize_both(x, offsets, self.power_of_two)
        return Scaled(*rows), Scaled(*columns)

    def requantize_columns(self, x: Scaled, offsets: torch.Tensor | None) -> Scaled:
        return Scaled(*self.tiles.requantize_columns(*x, offsets, self.power_of_two))

    def dequantize_rows(self, x: Scaled, dtype: torch.dtype) -> torch.Tensor:
        return self.tiles.dequantize_rows(*x, dtype)

    def quantize_e5m6(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.e5m6.quantize_e5m6(x)

    def dequantize_e5m6(self, packed: torch.Tensor, scale: torch.Tensor, cols: int, dtype: torch.dtype) -> torch.Tensor:
        return self.e5m6.dequantize_e5m6(packed, scale, cols, dtype)

    def e5m6_to_columns(self, packed: torch.Tensor, scale: torch.Tensor, cols: int) -> Scaled:
        return Scaled(*self.e5m6.e5m6_to_columns(packed, scale, cols, self.power_of_two))

    def quantize_weight(self, weight: torch.Tensor) -> tuple[Scaled, Scaled]:
        plain, turned = self.blocks.quantize_weight(weight, self.power_of_two)
        return Scaled(*plain), Scaled(*turned)

    def rms_norm(self, x, weight, eps, keep):
        tiles, inverse_rms = self.norm.rms_norm_quantize(x, weight, eps, self.power_of_two)
        return Scaled(*tiles), inverse_rms

    def swiglu(self, gate, up, weight, keep):
        out, *inputs = (Scaled(*x) for x in self.fused_swiglu.swiglu_quantize(gate, up, weight, self.power_of_two))
        return out, tuple(inputs) if keep else None

    def swiglu_backward(self, grad, gate, up, weight, offsets):
        out, *grads, grad_weight = self.fused_swiglu.swiglu_backward_quantize(
            grad, gate, up, weight, offsets, self.power_of_two
        )
        return Scaled(*out), *((Scaled(*rows), Scaled(*columns)) for rows, columns in grads), grad_weight

    def filled(self, x: Scaled, offsets: torch.Tensor) -> Scaled:
        """Columns of experts in either layout -> every tile filled up with zeros to 128."""
        if x.codes.shape[1] == 128 * x.scale.shape[1]:
            return x
        return Scaled(self.tiles.fill_tiles(x.codes.contiguous(), offsets), x.scale)


class Triton(KernelQuantizers):
    name = "triton"

    def __init__(self, power_of_two: bool = True):
        super().__init__(power_of_two)
        from dstrain.precision.kernels import gemm, grouped_gemm

        self.gemm, self.grouped = gemm, grouped_gemm

    @classmethod
    def require(cls, device: torch.device) -> None:
        require_package(cls.name, "triton", "triton", "3.6")
        from dstrain.precision.kernels.interpreter import interpreted

        if not interpreted():
            require_hopper(cls.name, device)

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device)
        self.gemm.matmul(*a, *b, out)
        return out

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        self.gemm.matmul(*a, *b, out, accumulate=True)

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(a.codes), b.codes.shape[1], dtype=dtype, device=a.codes.device)
        self.grouped.grouped_matmul(*a, *b, offsets, out)
        return out

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        self.grouped.grouped_accumulate(*self.filled(a, offsets), *self.filled(b, offsets), offsets, out)
