"""The corrected interpreter casts as the GPU does: right values from the formats' own numbers, nearest and ties to even."""

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

FP8 = torch.float8_e4m3fn


@pytest.fixture
def cast(monkeypatch):
    """cast(x, dtype): x through a kernel that does nothing else."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    @triton.jit
    def kernel(source, target, size: tl.constexpr):
        place = tl.arange(0, size)
        tl.store(target + place, tl.load(source + place).to(target.dtype.element_ty))

    def run(x, dtype):
        size = triton.next_power_of_2(len(x))
        padded = torch.zeros(size, dtype=x.dtype)
        padded[: len(x)] = x
        out = torch.empty(size, dtype=dtype)
        kernel[(1,)](padded, out, size)
        return out[: len(x)]

    return run


def test_fp32_to_e4m3_rounds_to_nearest_even_saturates_and_keeps_nan(cast):
    """Codes 0 to 0x7E are the numbers 0 to 448 in order, so the even neighbour of a half is the even code."""
    numbers = torch.arange(0x7F).to(torch.uint8).view(FP8).double()
    halves = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, halves, halves * (1 + 2.0**-20), halves * (1 - 2.0**-20)]).float()
    x = torch.cat([x, torch.tensor([450.0, 464.0, 500.0, 1e30, torch.inf, 1e-30, 1e-45])])
    distance = (x.double().clamp_max(448).unsqueeze(1) - numbers).abs()
    nearest = distance == distance.min(dim=1, keepdim=True).values
    even = nearest & (torch.arange(0x7F) % 2 == 0)
    codes = torch.where(nearest.sum(1) > 1, even.int().argmax(1), nearest.int().argmax(1))
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert torch.equal(cast(sign * x, FP8).view(torch.uint8).int(), codes.int() + bit)
    assert cast(torch.tensor([torch.nan]), FP8).view(torch.uint8) & 0x7F == 0x7F


def test_every_e4m3_code_becomes_its_number_in_wider_types(cast):
    codes = torch.arange(256).to(torch.uint8).view(FP8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(cast(codes, dtype).nan_to_num(-1), codes.to(dtype).nan_to_num(-1))


def test_fp32_and_bf16_round_to_nearest_even_with_subnormals(cast):
    """BF16 is the upper half of FP32: adding half a step, less one where the upper half is even, and cutting off."""
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=torch.Generator().manual_seed(0)).int()
    bits = torch.cat([bits, bits >> 8 & 0xFFFFFF, (bits & -65536) | 0x8000])  # any, tiny ones, halves
    bits = bits[bits.view(torch.float32).isfinite()]
    expected = ((bits.long() + 0x7FFF + (bits.long() >> 16 & 1)) >> 16).to(torch.int16)
    assert torch.equal(cast(bits.view(torch.float32), torch.bfloat16).view(torch.int16), expected)
    narrow = expected.view(torch.bfloat16)
    assert torch.equal(cast(narrow, torch.float32).view(torch.int32), expected.int() << 16)
