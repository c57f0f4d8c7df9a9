"""Rotary position embedding of the decoupled key, with YaRN (arXiv 2309.00071).

Pair j of the rotated dimensions is (2j, 2j + 1), as in DeepSeek's weights, turned by the angle position · θ_j.
Angles are computed in FP64 from integer positions and never live in a module, so no cast can round them.
"""

import math

import torch

from dstrain.config.schema import ModelConfig
from dstrain.precision.pointwise import rotate_pairs


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """θ_j = rope_theta^(-2j/d), float64 [d/2]; with YaRN interpolated by `factor` where a pair turns rarely.

    Pairs that turn more than beta_fast times over the original length stay as they are, those that turn less
    than beta_slow times are divided by the factor, and a linear ramp over the pair's index lies between.
    """
    dim, yarn = config.qk_rope_head_dim, config.rope_scaling
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = config.rope_theta**-exponents
    if yarn is None:
        return frequencies

    def pair_of_turns(turns: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (2 * math.pi * turns)
        return dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of_turns(yarn.beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return frequencies / yarn.factor * interpolated + frequencies * (1 - interpolated)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 for a factor up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_magnitude(config: ModelConfig) -> float:
    """What cos and sin are multiplied by: the ratio of the two YaRN factors, 1.0 for V3."""
    yarn = config.rope_scaling
    if yarn is None:
        return 1.0
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """qk_head_dim^-1/2, times the square of YaRN's mscale_all_dim factor."""
    scale, yarn = config.qk_head_dim**-0.5, config.rope_scaling
    return scale if yarn is None else scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2


class Rotary:
    """cos and sin of the angles of some positions, ready for every layer of a micro-batch."""

    def __init__(self, config: ModelConfig, positions: torch.Tensor, dtype: torch.dtype):
        """positions int64 [L] or [B, L]; dtype: the compute type. The tables are in at least FP32."""
        angles = positions.unsqueeze(-1).double() * inverse_frequencies(config).to(positions.device)
        magnitude, wide = rope_magnitude(config), torch.promote_types(dtype, torch.float32)
        self.cos = (angles.cos() * magnitude).to(wide)  # [(B,) L, d/2]
        self.sin = (angles.sin() * magnitude).to(wide)

    def at(self, places: torch.Tensor) -> "Rotary":
        """The angles of some of the positions, where those were [L]; places int64 of any shape."""
        rotary = object.__new__(Rotary)
        rotary.cos, rotary.sin = self.cos[places], self.sin[places]
        return rotary

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, L, heads, d] -> the same shape and type, each pair (2j, 2j + 1) turned."""
        return rotate_pairs(x, self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))
