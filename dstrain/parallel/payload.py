"""In what form hidden states go to experts: in the compute type, or as E4M3 with power-of-two scales (REFERENCE §3).

A payload turns hidden states into columns, tensors with one row a token, which are cut, sent and sorted row by row, and
back. FP8 goes one way only, to the experts: x in the forward pass, the gradient in the combine's backward. What comes
back from them is a sum in the making and stays in the compute type.
"""

from typing import Protocol

import torch

from dstrain.precision.fp8_scales import FP8
from dstrain.precision.on_device import dequantize_rows, quantize_rows


class Payload(Protocol):
    def encode(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [n, hidden] -> columns [n, ...]."""

    def decode(self, columns: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The columns of any rows -> [n, hidden] in `dtype`. Columns of zeros are a row of zeros."""


class ComputePayload:
    """Hidden states as they are."""

    def encode(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]

    def decode(self, columns: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        (x,) = columns
        return x.to(dtype)


class FP8Payload:
    """E4M3 codes [n, hidden] and the exponents of their scales [n, ⌈hidden/128⌉] (UE8M0), both as bytes.

    Decoding is exact: E4M3 has 4 significant bits, BF16 has 8, and a scale only moves the exponent (a scale below
    2^-124 can push E4M3's subnormals out of BF16's range; amax is then below 1e-34). So an expert's quantiser, given
    the decoded rows, finds the same numbers again: where a tile's largest code was rounded down to 224, half the scale
    with twice the codes. A tile with a NaN or an infinity is NaN, like there.
    """

    def encode(self, x: torch.Tensor) -> list[torch.Tensor]:
        codes, scale = quantize_rows(x)
        return [codes.view(torch.uint8), scale.to(torch.float8_e8m0fnu).view(torch.uint8)]

    def decode(self, columns: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, exponents = columns
        return dequantize_rows(codes.view(FP8), exponents.view(torch.float8_e8m0fnu).float(), dtype)


PAYLOADS: dict[str, Payload] = {"compute": ComputePayload(), "fp8": FP8Payload()}
