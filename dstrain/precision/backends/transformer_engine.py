"""FP8 products of Transformer Engine (its Float8BlockScaling recipe), which are cuBLASLt's.

Written from Transformer Engine's source, 2.12 and later. Nobody has run it yet; the layouts are checked on a CPU
against the rules that the source states:

    1x128     [⌈K/128⌉, rows rounded up to 4], contiguous
    128x128   [⌈N/128⌉, ⌈K/128⌉ rounded up to 4], contiguous
    sizes     K a multiple of 16; the rows of an operand with 1x128 scales, and N, multiples of 8

Activations' rows are filled up to 8. Experts are a loop.
"""

import torch
import torch.nn.functional as F

from dstrain.precision.backends.loops import LoopOverExperts
from dstrain.precision.backends.requirements import require_hopper, require_package
from dstrain.precision.fp8_gemm import Scaled


class TransformerEngine(LoopOverExperts):
    name = "transformer_engine"

    @classmethod
    def require(cls, device: torch.device) -> None:
        require_package(cls.name, "triton", "triton", "3.6")  # for the quantisers
        require_package(cls.name, "transformer_engine", "transformer-engine[pytorch]", "2.12")
        require_hopper(cls.name, device)

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        rows = len(a.codes)
        a = fill_rows(a)
        return general_gemm(self.operand(b), self.operand(a), out_dtype=dtype, layout="TN")[0][:rows]

    def add_product(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(self.operand(b), self.operand(a), out_dtype=out.dtype, layout="TN", out=out, accumulate=True)

    def operand(self, x: Scaled):
        """x as Transformer Engine's tensor; nothing is quantised again."""
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
        from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
            Float8BlockwiseQTensorStorage,
        )

        codes, scale, blocks = layout(x)
        fp8 = tex.DType.kFloat8E4M3
        quantizer = Float8BlockQuantizer(
            fp8, rowwise=True, columnwise=False, force_pow_2_scales=self.power_of_two,
            block_scaling_dim=2 if blocks else 1,
        )
        return Float8BlockwiseQTensorStorage(
            rowwise_data=codes, rowwise_scale_inv=scale, columnwise_data=None, columnwise_scale_inv=None,
            fp8_dtype=fp8, quantizer=quantizer, is_2D_scaled=blocks,
        )


def layout(x: Scaled) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """-> codes uint8, scales as the docstring above lays them out, whether they are of blocks."""
    from dstrain.precision.kernels.gemm import per_row, whole_16

    codes = whole_16(x.codes).contiguous().view(torch.uint8)
    tiled = per_row(x.scale, len(codes))
    scale = x.scale.t() if tiled else x.scale
    return codes, F.pad(scale, (0, -scale.shape[1] % 4)).contiguous(), not tiled


def fill_rows(x: Scaled) -> Scaled:
    """Rows of zeros with scale 1 behind, up to a multiple of 8."""
    missing = -len(x.codes) % 8
    if not missing:
        return x
    codes = F.pad(x.codes.view(torch.uint8), (0, 0, 0, missing)).view(x.codes.dtype)
    return Scaled(codes, F.pad(x.scale, (0, 0, 0, missing), value=1.0))
