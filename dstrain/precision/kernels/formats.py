"""Number formats inside kernels: scales, E4M3 and E5M6, bit for bit as `fp8_scales` and `e5m6` define them."""

import triton
import triton.language as tl

E4M3 = tl.constexpr(0)
E5M6 = tl.constexpr(1)


@triton.jit
def magnitude(x):
    """|x|, infinity for NaN: a maximum of these is finite exactly where every value is."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_of(amax, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr):
    """`fp8_scales.scale_of`, where an infinite amax stands for NaN too."""
    if POWER_OF_TWO:
        mantissa: tl.constexpr = 0x600000 if FORMAT == E4M3 else 0x7E0000
        exponent: tl.constexpr = 8 if FORMAT == E4M3 else 15
        rounded = (amax.to(tl.int32, bitcast=True) + (0x7FFFFF - mantissa)) >> 23
        scale = (tl.maximum(rounded - exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        largest: tl.constexpr = 448.0 if FORMAT == E4M3 else 65024.0
        scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, largest, tl.float32)), 1.1754943508222875e-38)
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def divide(x, scale, POWER_OF_TWO: tl.constexpr):
    """x / scale correctly rounded, NaN where scale is. `/` would be an approximation.

    A power of two that is a scale has an exact inverse, and a product with it rounds as the quotient does.
    """
    if POWER_OF_TWO:
        inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        return x * tl.where(scale == scale, inverse, float("nan"))
    else:
        x, scale = tl.broadcast(x, scale)
        return tl.div_rn(x, scale)


@triton.jit
def to_e4m3(x, scale, POWER_OF_TWO: tl.constexpr):
    """`fp8_scales.to_e4m3`: rounded to nearest even; 0x7F wherever the scale is NaN."""
    quotient = divide(x, scale, POWER_OF_TWO)
    return tl.where(quotient == quotient, quotient, float("nan")).to(tl.float8e4nv)


@triton.jit
def e5m6_encode(x):
    """FP32, magnitudes up to 65024 or NaN -> E5M6 codes int32 [0, 4096), to nearest even; a NaN's code is 0."""
    bits = x.to(tl.int32, bitcast=True)
    positive = bits & 0x7FFFFFFF
    normal = ((positive + 0xFFFF + ((positive >> 17) & 1)) >> 17) - ((127 - 15) << 6)
    # The subnormal step is 2^-20, which is the last bit of numbers in [8, 16): adding 8 rounds to it.
    subnormal = (tl.abs(x) + 8.0).to(tl.int32, bitcast=True) - 0x41000000
    code = tl.where(tl.abs(x) < 6.103515625e-05, subnormal, normal) | ((bits >> 20) & 0x800)
    return tl.where(x == x, code, 0)


@triton.jit
def e5m6_decode(code):
    """A code is the upper 12 bits of an FP16 number. -> FP32, exact."""
    return (code << 4).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e5m6_load(packed, column, mask):
    """Codes of `column` (broadcast with the pointers `packed` to rows), of which two share three bytes."""
    first = packed + 3 * (column // 2) + column % 2
    low = tl.load(first, mask=mask, other=0).to(tl.int32)
    high = tl.load(first + 1, mask=mask, other=0).to(tl.int32)
    return tl.where(column % 2 == 0, low | ((high & 0xF) << 8), (low >> 4) | (high << 4))
