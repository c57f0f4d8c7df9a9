"""The seam behind which FP8 runs: quantisers and block-scaled matrix products of one backend, and their registry.

Every product is C = A Bᵀ of operands that are contiguous along the contraction dimension K, each with one FP32 scale
per 128 of it:

    Fprop   y  = x Wᵀ      A = x [rows, in]        B = W [out, in], 128x128 blocks       K = in
    Dgrad   dx = dy W      A = dy [rows, out]      B = Wᵀ [in, out], 128x128 blocks      K = out
    Wgrad   dW += dyᵀ x    A = dyᵀ [out, rows]     B = xᵀ [in, rows], 1x128 both         K = rows

Grouped: rows [offsets[e-1], offsets[e]) belong to expert e, offsets int32 [experts] on the device. Fprop and Dgrad take
B [experts, N, K]; in Wgrad K is the rows of each expert, with tiles that start anew at every expert
(`fp8_tiles.column_tiles`). Partial sums are promoted to FP32 at least every 128 of K (arXiv 2412.19437 §3.3.2).
"""

import importlib
from typing import NamedTuple

import torch

from dstrain.config.errors import InputError
from dstrain.precision import e5m6, fp8_blocks, fp8_tiles
from dstrain.precision.pointwise import (
    rms_norm_forward, swiglu_backward, swiglu_forward, weighted_swiglu_backward, weighted_swiglu_forward,
)


class Scaled(NamedTuple):
    """An operand: E4M3 codes and FP32 scales, each code's value is code · its tile's scale."""

    codes: torch.Tensor
    scale: torch.Tensor | None  # None: a backend's own form, with the values themselves in `codes`


class GemmBackend:
    """Products are a backend's own. The quantisers are the definitions unless it has faster ones, equal bit by bit."""

    name: str

    def __init__(self, power_of_two: bool = True):
        """power_of_two: the scales that the quantisers give; products take any."""
        self.power_of_two = power_of_two

    @classmethod
    def require(cls, device: torch.device) -> None:
        """InputError that names the package, the device or its capability where this backend cannot run on `device`."""
        raise NotImplementedError

    # Products --------------------------------------------------------------------------------------------------

    def matmul(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        """a [M, K] with scale [M, ⌈K/128⌉], b [N, K] with scale [⌈N/128⌉, ⌈K/128⌉] -> [M, N] in `dtype` (BF16, FP32)."""
        raise NotImplementedError

    def accumulate(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        """out FP32 [M, N] += a bᵀ; a [M, K], b [N, K], both with scales per 1x128: [·, ⌈K/128⌉]."""
        raise NotImplementedError

    def grouped_matmul(self, a: Scaled, b: Scaled, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """a [rows, K], b [experts, N, K] with scale [experts, ⌈N/128⌉, ⌈K/128⌉] -> [rows, N] in `dtype`.

        Rows from offsets[-1] on belong to nobody; what the result holds there is undefined.
        """
        raise NotImplementedError

    def grouped_accumulate(self, a: Scaled, b: Scaled, offsets: torch.Tensor, out: torch.Tensor) -> None:
        """out FP32 [experts, M, N] += a bᵀ, expert by expert over its own rows; one without rows adds nothing.

        a [M, rows], b [N, rows] with scales [·, fp8_tiles.column_tiles(rows, offsets)].
        """
        raise NotImplementedError

    # Quantisers ------------------------------------------------------------------------------------------------

    def quantize_rows(self, x: torch.Tensor) -> Scaled:
        """x [rows, cols] -> 1x128 tiles; see `fp8_tiles.quantize_rows`."""
        return Scaled(*fp8_tiles.quantize_rows(x, self.power_of_two))

    def quantize_operand(self, x: torch.Tensor) -> Scaled:
        """`quantize_rows` for a product alone: nobody keeps or requantises it, so a backend may give its own form."""
        return self.quantize_rows(x)

    def quantize_columns(self, x: torch.Tensor, offsets: torch.Tensor | None) -> Scaled:
        """x [rows, cols] -> 128x1 tiles, transposed; see `fp8_tiles.quantize_columns`."""
        return Scaled(*fp8_tiles.quantize_columns(x, offsets, self.power_of_two))

    def quantize_both(self, x: torch.Tensor, offsets: torch.Tensor | None) -> tuple[Scaled, Scaled]:
        """What Dgrad and Wgrad take of dy: `quantize_operand` and `quantize_columns`, which one pass can give."""
        return self.quantize_operand(x), self.quantize_columns(x, offsets)

    def requantize_columns(self, x: Scaled, offsets: torch.Tensor | None) -> Scaled:
        """Kept 1x128 activations as Wgrad takes them; see `fp8_tiles.requantize_columns`."""
        return Scaled(*fp8_tiles.requantize_columns(*x, offsets, self.power_of_two))

    def dequantize_rows(self, x: Scaled, dtype: torch.dtype) -> torch.Tensor:
        """1x128 tiles -> [rows, cols] in `dtype`."""
        return fp8_tiles.dequantize_rows(*x, dtype)

    def quantize_e5m6(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, cols] -> packed, scale; see `e5m6.quantize_e5m6`."""
        return e5m6.quantize_e5m6(x)

    def e5m6_to_columns(self, packed: torch.Tensor, scale: torch.Tensor, cols: int) -> Scaled:
        """-> 128x1 tiles of E4M3, transposed; see `e5m6.e5m6_to_columns`."""
        return Scaled(*e5m6.e5m6_to_columns(packed, scale, cols, self.power_of_two))

    def quantize_weight(self, weight: torch.Tensor) -> tuple[Scaled, Scaled]:
        """weight [..., out, in] -> W and Wᵀ in 128x128 blocks, as Fprop and Dgrad take them; kept for a whole step."""
        codes, scale = fp8_blocks.quantize_blocks(weight, self.power_of_two)
        return Scaled(codes, scale), Scaled(codes.mT.contiguous(), scale.mT.contiguous())

    def dequantize_weight(self, weight: Scaled, dtype: torch.dtype) -> torch.Tensor:
        """The first that `quantize_weight` gives -> [..., out, in] in `dtype`."""
        return fp8_blocks.dequantize_blocks(*weight, dtype)

    # Between products ------------------------------------------------------------------------------------------

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, keep: bool) -> tuple[Scaled, torch.Tensor]:
        """x [rows, n] -> x / rms · weight as Fprop takes it, with `keep` in 1x128 tiles; 1 / rms FP32 [rows, 1]."""
        y, inverse_rms = rms_norm_forward(x, weight, eps)
        return (self.quantize_rows if keep else self.quantize_operand)(y), inverse_rms

    def swiglu(
        self, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, keep: bool
    ) -> tuple[Scaled, tuple[Scaled, Scaled] | None]:
        """gate, up [rows, n] BF16; weight FP32 [rows], a factor of each row, or None.

        -> silu(gate) · up · weight as the down projection takes it; with `keep`, gate and up in 1x128 tiles.
        """
        out = swiglu_forward(gate, up) if weight is None else weighted_swiglu_forward(gate, up, weight)
        return self.quantize_operand(out), (self.quantize_rows(gate), self.quantize_rows(up)) if keep else None

    def swiglu_backward(
        self, grad: torch.Tensor, gate: Scaled, up: Scaled, weight: torch.Tensor | None, offsets: torch.Tensor | None
    ) -> tuple[Scaled, tuple[Scaled, Scaled], tuple[Scaled, Scaled], torch.Tensor | None]:
        """grad [rows, n] of what `swiglu` gave; gate, up as it kept them.

        -> the output again, for the down projection's Wgrad; d gate and d up, each as Dgrad and as Wgrad take it; the
        gradient of weight.
        """
        wide, grad_weight = [self.dequantize_rows(x, grad.dtype) for x in (gate, up)], None
        if weight is None:
            out, grads = swiglu_forward(*wide), swiglu_backward(grad, *wide)
        else:
            out = weighted_swiglu_forward(*wide, weight)
            *grads, grad_weight = weighted_swiglu_backward(grad, *wide, weight)
        return self.quantize_columns(out, offsets), *(self.quantize_both(x, offsets) for x in grads), grad_weight


# Backends by name: module and class. A module is imported only when it is chosen, so a missing package stops nobody else.
BACKENDS = {
    "emulated": ("dstrain.precision.backends.emulated", "Emulated"),
    "triton": ("dstrain.precision.backends.triton_kernels", "Triton"),
    "torch": ("dstrain.precision.backends.torch_scaled_mm", "TorchScaledMM"),
    "transformer_engine": ("dstrain.precision.backends.transformer_engine", "TransformerEngine"),
    "deepgemm": ("dstrain.precision.backends.deep_gemm", "DeepGemm"),
}


def backend(name: str, device: torch.device, power_of_two: bool = True) -> GemmBackend:
    """The backend called `name`, checked to run on `device`. `auto`: triton on Hopper, else emulated."""
    if name == "auto":
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        name = "triton" if hopper else "emulated"
    if name not in BACKENDS:
        raise InputError(f"precision.backend={name!r}: valid are auto, {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    chosen = getattr(importlib.import_module(module), cls)
    chosen.require(device)
    return chosen(power_of_two)
