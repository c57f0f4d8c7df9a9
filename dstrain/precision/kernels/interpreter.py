"""Triton's interpreter, corrected: with it the kernels here run on a CPU and give the bits that a GPU gives.

What the interpreter of Triton 3.6 to 3.9 gets wrong in casts between floats:
- FP32 to E4M3 rounds halves up instead of to even, loses a carry out of the mantissa, does not saturate, and shifts
  subnormals by undefined amounts;
- E4M3 to anything, and anything to E4M3, takes NaN for 480;
- FP32 to BF16 cuts off instead of rounding, and BF16's subnormals become other FP32 numbers.
PyTorch's casts are right, so they take its place. The GPU's instruction for E4M3 (`cvt.rn.satfinite`) differs from them
in one thing: it saturates, which is done here too.

Kernels are interpreted where TRITON_INTERPRET=1 stood in the environment when Triton was first imported; the tests and
`tools/gpu_check.py --dry` do that.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_WRONG = {(tl.float32, tl.bfloat16), (tl.bfloat16, tl.float32)} | {
    pair for other in (tl.float32, tl.float16, tl.bfloat16) for pair in ((other, tl.float8e4nv), (tl.float8e4nv, other))
}
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}  # what torch and NumPy both have, by bytes
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_others = interpreter._convert_float


def correct_casts() -> None:
    """From now on casts to and from E4M3 and between FP32 and BF16 are PyTorch's, saturating to E4M3."""
    interpreter._convert_float = _convert_float


def _convert_float(data, source, target, rounding_mode):
    """What the interpreter calls for every cast between floats: bits in and bits out, as NumPy arrays."""
    if (source, target) not in _WRONG:
        return _others(data, source, target, rounding_mode)
    data = np.ascontiguousarray(data)
    values = torch.from_numpy(data.view(_SIGNED[data.itemsize])).view(_TYPES[source])
    if target == tl.float8e4nv:
        values = values.float().clamp(-448, 448)  # NaN stays NaN
    cast = values.to(_TYPES[target])
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cast.itemsize]
    return cast.view(whole).numpy().view(_UNSIGNED[cast.itemsize])


def interpreted() -> bool:
    """Whether this process's kernels are interpreted, and so run on any device."""
    from dstrain.precision.kernels import gemm

    return isinstance(gemm.matmul_kernel, interpreter.InterpretedFunction)
