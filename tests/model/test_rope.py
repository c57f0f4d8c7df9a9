"""RoPE and YaRN against numbers worked out by hand from the formulas (FAULTS B01, B04)."""

import math

import pytest
import torch
from oracle import tiny_config

from dstrain.config.schema import YarnConfig
from dstrain.model.batch import MicroBatch
from dstrain.model.rope import Rotary, inverse_frequencies, rope_magnitude, softmax_scale


def v3(mscale=1.0, mscale_all_dim=1.0):
    yarn = YarnConfig(40.0, 4096, 32.0, 1.0, mscale, mscale_all_dim)
    return tiny_config(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=yarn)


def test_v3_puts_yarn_into_the_softmax_scale_and_not_into_the_angles():
    # m = 0.1 · ln 40 + 1 = 1.36888;  192^-0.5 = 0.0721688;  0.0721688 · m² = 0.13523
    assert rope_magnitude(v3()) == 1.0
    assert softmax_scale(v3()) == pytest.approx(0.13523, abs=5e-6)
    assert softmax_scale(tiny_config(qk_nope_head_dim=128, qk_rope_head_dim=64)) == pytest.approx(0.07217, abs=5e-6)


def test_the_two_yarn_factors_are_not_mixed_up():
    config = v3(mscale=1.0, mscale_all_dim=0.707)
    # (0.1 ln 40 + 1) / (0.0707 ln 40 + 1) = 1.0857; (0.0707 ln 40 + 1)² = 1.5896
    assert rope_magnitude(config) == pytest.approx(1.0857, abs=5e-5)
    assert softmax_scale(config) * math.sqrt(192) == pytest.approx(1.5896, abs=5e-5)
    tables = Rotary(config, torch.tensor([0, 3]), torch.float64)
    torch.testing.assert_close(tables.cos**2 + tables.sin**2, torch.full((2, 32), 1.0857**2, dtype=torch.float64), rtol=1e-4, atol=0)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain, scaled = inverse_frequencies(tiny_config(qk_rope_head_dim=64)), inverse_frequencies(v3())
    ratio = plain / scaled
    # correction dims of 32 turns and 1 turn over 4096 positions: floor 10.4, ceil 22.5
    assert torch.all(ratio[:11] == 1) and torch.allclose(ratio[23:], torch.tensor(40.0, dtype=torch.float64))
    assert torch.all(ratio[11:23].diff() > 0)


def test_a_pair_is_two_neighbours_turned_by_its_angle():
    """FAULTS B03: dims (0, 1) turn by 1 rad at position 1, dims (2, 3) by theta^(-1/2) = 0.01."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    y = Rotary(tiny_config(qk_rope_head_dim=4), torch.tensor([1]), torch.float64).rotate(x).flatten()
    expected = []
    for (a, b), angle in (((1.0, 2.0), 1.0), ((3.0, 4.0), 0.01)):
        expected += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_positions_and_angles_are_not_rounded_to_bf16():
    """BF16 cannot tell 256 from 257; the tables are those of FP64 to FP32's rounding."""
    config = tiny_config(qk_rope_head_dim=64)
    positions = torch.arange(4096)
    bf16 = Rotary(config, positions, torch.bfloat16)
    exact = positions.double().unsqueeze(-1) * inverse_frequencies(config)
    assert bf16.cos.dtype == torch.float32
    torch.testing.assert_close(bf16.cos.double(), exact.cos(), rtol=0, atol=1e-7)
    assert not torch.equal(bf16.sin[256], bf16.sin[257])


def test_positions_restart_with_every_document_under_the_document_mask():
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])
    batch = MicroBatch(torch.zeros(1, 8, dtype=torch.int64), documents, depth=1, document_mask=True)
    assert batch.starts.tolist() == [[0, 0, 0, 3, 3, 5]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert MicroBatch(batch.tokens, documents, depth=1).positions.tolist() == [0, 1, 2, 3, 4, 5]
