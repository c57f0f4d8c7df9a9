"""FP8 products of PyTorch: `torch.nn.functional.scaled_mm` with 1x128 and 128x128 scales, which is cuBLASLt's.

Written from PyTorch's documentation and source (2.11 and later; it asks for Hopper and cuBLASLt 12.9). Nobody has run
it on a GPU yet; the layouts are checked on a CPU against the rules that the source states:

    1x128     [rows, ⌈K/128⌉] with strides (1, rows)
    128x128   of B: [⌈K/128⌉ rounded up to 4, ⌈N/128⌉] with strides (1, that)

PyTorch has no grouped product with these scales, so experts are a loop.
"""

import torch
import torch.nn.functional as F

from dstrain.config.errors import InputError
from dstrain.precision.backends.loops import LoopOverExperts
from dstrain.precision.backends.requirements import numbers, require_hopper, require_package
from dstrain.precision.fp8_gemm import Scaled


class TorchScaledMM(LoopOverExperts):
    name = "torch"

    @classmethod
    def require(cls, device: torch.device) -> None:
        require_package(cls.name, "triton", "triton", "3.6")  # for the quantisers
        require_hopper(cls.name, device)
        if not hasattr(F, "scaled_mm") or not hasattr(F.ScalingType, "BlockWise1x128"):
            raise InputError(
                f"precision.backend={cls.name} needs a torch whose torch.nn.functional.scaled_mm scales by blocks "
                f"(torch>=2.11); {torch.__version__} is installed"
            )
        if numbers(torch.version.cuda or "") < (12, 9):
            raise InputError(
                f"precision.backend={cls.name} needs a torch built for CUDA 12.9 or newer (cuBLASLt's block scales); "
                f"{torch.__version__} was built for {torch.version.cuda}"
            )

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype) -> torch.Tensor:
        from dstrain.precision.kernels.gemm import per_row, whole_16

        one, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        tiled = per_row(b.scale, len(b.codes))
        return F.scaled_mm(
            whole_16(a.codes), whole_16(b.codes).t(), tile_scales(a.scale), one,
            tile_scales(b.scale) if tiled else block_scales(b.scale), one if tiled else block, output_dtype=dtype,
        )

    def add_product(self, a: Scaled, b: Scaled, out: torch.Tensor) -> None:
        out.add_(self.product(a, b, out.dtype))


def tile_scales(scale: torch.Tensor) -> torch.Tensor:
    """[rows, ⌈K/128⌉] with strides (1, rows), to the letter where a size is 1."""
    return torch.empty_strided(scale.shape, (1, scale.shape[0]), dtype=scale.dtype, device=scale.device).copy_(scale)


def block_scales(scale: torch.Tensor) -> torch.Tensor:
    """[⌈N/128⌉, ⌈K/128⌉] -> [⌈K/128⌉ rounded up to 4, ⌈N/128⌉] with strides (1, that)."""
    return tile_scales(F.pad(scale, (0, -scale.shape[1] % 4)).t())
