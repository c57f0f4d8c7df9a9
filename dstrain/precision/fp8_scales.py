"""The scale of a tile or block from its largest magnitude, the rule that every FP8 quantiser here shares.

    value ≈ code · scale,   scale = the smallest power of two that is at least amax / largest   (V3.1; the default)
                            or amax / largest as it is, in FP32                                  (V3)

No floor (arXiv 2412.19437 works on gradients near 1e-10): an amax of 0 has scale 1; any other amax keeps its own scale
down to 2^-126, FP32's smallest normal number, so multiplying a tensor by a power of two multiplies its scales and leaves
its codes alone. A NaN or an infinity in a tile makes the scale NaN: the whole tile dequantises to NaN, which the
trainer's guard sees, and never to a clipped number. (A number from 248 · 2^120, 3.3e38, on is rounded up to 2^128, FP32's
infinity, and is seen likewise.)
"""

import torch

TILE = 128  # elements of a tile along the contraction dimension, and the side of a weight's block
E4M3_MAX = 448.0  # 1.75 · 2^8
E5M6_MAX = 65024.0  # 1.984375 · 2^15
FP8 = torch.float8_e4m3fn
SMALLEST_SCALE = 2.0**-126


def scale_of(amax: torch.Tensor, power_of_two: bool, largest: float = E4M3_MAX) -> torch.Tensor:
    """amax FP32 (at least 0, or NaN) -> FP32 scales of the same shape.

    largest: the format's largest number; its mantissa decides when a power of two is too small.
    """
    if power_of_two:
        # amax = 1.f · 2^a and largest = 1.g · 2^l: the exponent is a - l, one more where f > g. Adding what f lacks to a
        # carry does that on the bits, exactly, also where amax / largest would round.
        mantissa, exponent = _MANTISSA_AND_EXPONENT[largest]
        rounded = (amax.view(torch.int32) + (0x7FFFFF - mantissa)) >> 23
        scale = ((rounded - exponent).clamp_min(1) << 23).view(torch.float32)
    else:
        scale = (amax / largest).clamp_min(SMALLEST_SCALE)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax < torch.inf, scale, torch.nan)


_MANTISSA_AND_EXPONENT = {E4M3_MAX: (0x600000, 8), E5M6_MAX: (0x7E0000, 15)}


def to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP32 values and their scales, which broadcast -> E4M3, to nearest even; code 0x7F wherever the scale is NaN.

    The division is the correctly rounded one: an approximate one or a reciprocal differs in the last bit with FP32 scales.
    """
    return torch.where(scale == scale, values / scale, torch.nan).to(FP8)


def rounded_e4m3(values: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor | None) -> torch.Tensor:
    """What is left of BF16 or FP32 `values` behind E4M3: `to_e4m3` and back, FP32, without the casts, which cost most of
    the time on a CPU. inverse: 1 / scale if that is exact, else None."""
    if inverse is not None and values.dtype == torch.bfloat16:
        return round_bits(values.float() * inverse, 4, 2.0**-6) * scale
    return round_bits((values.float() / scale).double(), 4, 2.0**-6).float() * scale


def round_bits(values: torch.Tensor, bits: int, smallest_normal: float) -> torch.Tensor:
    """To the nearest number of `bits` significant bits, below `smallest_normal` of as many places; ties to even.

    values: BF16's numbers in FP32, or FP32's in FP64, of magnitudes far from the type's largest. So few bits of them are
    in use that a suitable multiple of a value, a power of two times it, has the wanted step in its last place, an even
    number there, and no carry to come: adding it rounds, and taking it away is exact.
    """
    digits = 24 if values.dtype == torch.float32 else 53
    step = smallest_normal * 2.0 ** (1 - bits)
    shift = torch.where(values.abs() < smallest_normal, 1.5 * 2.0 ** (digits - 1) * step, values * 2.0 ** (digits - bits))
    return values + shift - shift
