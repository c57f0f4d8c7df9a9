"""FP8 weights in 128x128 blocks: right values from the rule written out block by block, and from transformers."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from dstrain.precision.fp8_blocks import FP8, dequantize_blocks, quantize_blocks, scale_shape


def uneven(rows, columns, seed=0):
    """A weight whose blocks differ in magnitude by factors of 10, so that a neighbour's scale would be seen."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            weight[i : i + 128, j : j + 128] *= 10.0 ** ((i // 128 + 2 * (j // 128)) % 5 - 2)
    return weight


# FAULTS B08: 576 and 2112 rows occur in DeepSeek-V3; scale shapes are ceil(size / 128).
SHAPES = {
    (576, 256): (5, 2), (2112, 128): (17, 1), (130, 130): (2, 2), (1, 1): (1, 1), (7, 192): (1, 2), (256, 384): (2, 3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power_of_two", [True, False])
def test_each_block_has_the_scale_of_its_own_largest_value_also_the_ragged_last_ones(shape, power_of_two):
    weight = uneven(*shape)
    quantized, scales = quantize_blocks(weight, power_of_two)
    assert quantized.dtype == FP8 and quantized.shape == shape
    assert scales.dtype == torch.float32 and tuple(scales.shape) == SHAPES[shape] == scale_shape(shape)
    back = dequantize_blocks(quantized, scales, torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            amax, scale = weight[place].abs().max().item(), scales[i, j].item()
            if power_of_two:
                assert torch.frexp(scales[i, j])[0] == 0.5 and amax / 448 <= scale < 2 * amax / 448 * (1 + 1e-6)
            else:
                assert scale == pytest.approx(amax / 448, rel=1e-7)
            assert torch.equal(back[place], quantized[place].float() * scale)
            # E4M3 has 3 bits of mantissa: half a step is 1/16 of a value, at most 16 of 448
            assert (back[place] - weight[place]).abs().max() < 0.04 * amax * (2 if power_of_two else 1)


@pytest.mark.parametrize("power_of_two", [True, False])
def test_blocks_of_zeros_have_scale_one_and_stay_zeros(power_of_two):
    """FAULTS B07."""
    weight = torch.zeros(256, 256)
    weight[0, 0] = 1
    quantized, scales = quantize_blocks(weight, power_of_two)
    assert scales.flatten()[1:].tolist() == [1.0, 1.0, 1.0] and scales[0, 0] > 0
    back = dequantize_blocks(quantized, scales, torch.float32)
    assert back.isfinite().all() and back.count_nonzero() == 1 and back[0, 0] == pytest.approx(1, rel=0.07)


def test_an_exact_power_of_two_is_not_rounded_further():
    """448 · 2^-3 in a block gives amax / 448 = 2^-3 exactly."""
    assert quantize_blocks(torch.tensor([[56.0]]))[1].item() == 0.125
    assert quantize_blocks(torch.tensor([[56.01]]))[1].item() == 0.25


def test_weights_of_gradient_size_and_smaller_keep_finite_scales():
    """Magnitudes near 1e-10 must not meet a floor; FP32's smallest numbers must not give infinities."""
    weight = torch.full((4, 4), 3e-10)
    assert dequantize_blocks(*quantize_blocks(weight), torch.float32)[0, 0] == pytest.approx(3e-10, rel=0.07)
    tiny = dequantize_blocks(*quantize_blocks(torch.full((4, 4), 1e-44)), torch.float32)
    assert tiny.isfinite().all()


def test_a_stack_is_quantised_matrix_by_matrix():
    stack = torch.stack([uneven(130, 200, seed) for seed in range(3)])
    quantized, scales = quantize_blocks(stack)
    for i in range(3):
        alone, scale = quantize_blocks(stack[i])
        assert torch.equal(quantized[i].view(torch.uint8), alone.view(torch.uint8)) and torch.equal(scales[i], scale)


@pytest.mark.parametrize("shape", [(256, 128), (128, 384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_multiples_of_128_dequantise_to_transformers_bits(shape, dtype):
    quantized, scales = quantize_blocks(uneven(*shape), power_of_two=False)
    theirs = Fp8Dequantize(None)._dequantize_one(quantized, scales, dtype)
    assert torch.equal(dequantize_blocks(quantized, scales, dtype), theirs)


def test_ragged_weights_follow_the_zero_pad_rule_of_the_released_description():
    """The description of DeepSeek's weights: a weight whose size is no multiple of 128 is padded with zeros to one,
    then scaled block by block, and the padding is cut off. (transformers 5.24 refuses 576 rows, mis-scales others.)"""
    weight = uneven(576, 200)
    quantized, scales = quantize_blocks(weight, power_of_two=False)
    padded = torch.zeros(640, 256)
    padded[:576, :200] = quantized.float()
    expected = (padded * scales.repeat_interleave(128, 0).repeat_interleave(128, 1))[:576, :200]
    assert torch.equal(dequantize_blocks(quantized, scales, torch.float32), expected)
    padded[:576, :200] = weight
    assert torch.equal(scales, padded.view(5, 128, 2, 128).abs().amax(dim=(1, 3)) / 448)
    with pytest.raises(ValueError):
        Fp8Dequantize(None)._dequantize_one(quantized, scales, torch.float32)


def test_scales_of_another_shape_are_refused():
    quantized, scales = quantize_blocks(torch.ones(130, 130))
    with pytest.raises(ValueError):
        dequantize_blocks(quantized, scales[:1], torch.float32)
