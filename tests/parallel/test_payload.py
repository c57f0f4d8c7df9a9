"""FP8 payload: what is decoded is what the quantiser's definition gives, and quantising it again changes nothing."""

import pytest
import torch
from helpers import compiled_kernels

from dstrain.parallel.payload import FP8Payload
from dstrain.precision import on_device
from dstrain.precision.fp8_tiles import dequantize_rows, quantize_rows


pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@pytest.fixture(autouse=True, params=["definitions", "kernels"])
def way(request, monkeypatch):
    """On a GPU the Triton kernels do it; here Triton's interpreter runs them."""
    if request.param == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr(on_device, "by_kernels", lambda x: True)


def hard_rows() -> torch.Tensor:
    """Every magnitude BF16 has, tiles of zeros, and tiles whose largest code is rounded down to 224."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 300, generator=generator)
    x *= 2.0 ** torch.arange(-120, 120, 0.4)[:600].unsqueeze(1)
    x[:, 128:256] = 0
    x[7, 130] = 1e-38
    x[100:200, 3] = 228.0 * 2.0 ** torch.arange(100)
    return x.bfloat16()


def test_decoded_rows_are_the_dequantised_ones_and_one_byte_carries_a_scale_exactly():
    x, payload = hard_rows(), FP8Payload()
    codes, scale = quantize_rows(x)
    columns = payload.encode(x)
    assert [(c.shape, c.dtype) for c in columns] == [((600, 300), torch.uint8), ((600, 3), torch.uint8)]
    assert torch.equal(columns[1].view(torch.float8_e8m0fnu).float(), scale)
    assert torch.equal(payload.decode(columns, torch.bfloat16), dequantize_rows(codes, scale, torch.bfloat16))
    assert torch.equal(payload.decode(columns, torch.bfloat16).float(), dequantize_rows(codes, scale, torch.float32))


def test_an_experts_quantiser_finds_the_same_numbers_again():
    payload = FP8Payload()
    decoded = payload.decode(payload.encode(hard_rows()), torch.bfloat16)
    codes, scale = quantize_rows(decoded)
    assert torch.equal(dequantize_rows(codes, scale, torch.bfloat16), decoded)
    first_codes, first_scale = quantize_rows(hard_rows())
    halved = scale != first_scale
    assert 0 < halved.sum() and torch.equal(scale[halved], first_scale[halved] / 2)


def test_rows_of_zero_bytes_are_zeros_and_a_nan_makes_its_tile_nan():
    payload = FP8Payload()
    x = hard_rows()
    x[5, 140] = torch.nan
    columns = payload.encode(x)
    decoded = payload.decode(columns, torch.bfloat16)
    assert decoded[5, 128:256].isnan().all() and decoded.isnan().sum() == 128
    assert not payload.decode([torch.zeros_like(c) for c in columns], torch.bfloat16).any()
    assert payload.decode(payload.encode(x[:0]), torch.bfloat16).shape == (0, 300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_a_tokens_rows_are_float64s_rounded_once(dtype):
    rows = torch.randn(90, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    places = torch.randint(0, 90, (30, 4), generator=torch.Generator().manual_seed(1))
    exact = rows.double()[places].sum(1)
    sums = on_device.sum_rows(rows, places)
    assert sums.dtype == dtype
    torch.testing.assert_close(sums.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    with compiled_kernels():
        assert torch.equal(on_device.sum_rows(rows, places), sums)
