"""Published parameter counts, initialisation by name, and FLOPs counted by hand."""

import pytest
import torch
from oracle import tiny_config

from dstrain.config.compose import compose
from dstrain.model.count import count_parameters, flops_per_token, unit_flops, unit_parameters
from dstrain.model.init import initial_value
from dstrain.model.model import Model
from dstrain.model.unit import Unit


def model_config(name):
    return compose("train", [f"model={name}"])[0].model


def test_v3_has_the_published_parameters():
    """671B in the main model, 37B activated, 11.5B unique to an MTP module, from the released configuration."""
    counts = count_parameters(model_config("v3_671b"))
    assert counts.main == 671_026_404_352
    assert counts.main + counts.buffers == 671_026_419_200
    assert counts.per_mtp == 11_610_067_968
    assert counts.activated == 37_552_282_624
    four = count_parameters(model_config("v3_671b_mtp4"))
    assert four.total == counts.main + 4 * counts.per_mtp and four.activated == counts.activated


def test_v2_lite_has_the_published_parameters_and_a_plain_query():
    """FAULTS B21: without a query LoRA there is q_proj and no q_a_*."""
    config = model_config("v2_lite_16b")
    assert count_parameters(config).main == 15_706_484_224
    with torch.device("meta"):
        names = Model(config, torch.bfloat16).state_dict()
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if ".q_a_" in name or ".q_b_" in name or "bias" in name]


def test_flops_of_a_tiny_model_counted_by_hand():
    """FAULTS C16. Multiply-adds of the forward per token, then times 2 (FLOPs) and 3 (forward and backward)."""
    config = tiny_config(num_nextn_predict_layers=1)  # hidden 24, 4 heads, 3 layers of which 1 dense, 8 experts top-3
    assert (config.hidden_size, config.num_attention_heads, config.vocab_size) == (24, 4, 61)
    query = 24 * 12 + 12 * 4 * 12
    key_value = 24 * (8 + 4) + 8 * 4 * (8 + 6)
    keys_seen = (16 + 1) / 2
    core = 4 * (12 + 6) * keys_seen
    attention = query + key_value + core + 4 * 6 * 24
    dense = attention + 3 * 24 * config.intermediate_size
    moe = attention + 24 * 8 + 3 * 24 * config.moe_intermediate_size * (3 + config.n_shared_experts)
    head = 24 * 61
    forward = dense + 2 * moe + head + (2 * 24 * 24 + moe + head)
    assert flops_per_token(config, 16) == 6 * forward


def test_flops_of_the_units_are_those_of_the_whole():
    """By hand for the units without a block; an MTP unit is a MoE block, its merge and a head."""
    config = model_config("v3_671b_mtp4")
    flops = {str(unit): unit_flops(config, unit, 4096) for unit in unit_parameters(config)}
    assert sum(flops.values()) == flops_per_token(config, 4096) and len(flops) == 1 + 61 + 1 + 4
    assert flops["embed"] == 0 and flops["head"] == 6 * 7168 * 129280
    assert flops["block 0"] - flops["block 3"] == 6 * (3 * 7168 * 18432 - 7168 * 256 - 9 * 3 * 7168 * 2048)
    assert flops["mtp 1"] == flops["mtp 4"] == flops["block 60"] + flops["head"] + 6 * 2 * 7168**2


@pytest.mark.parametrize("name", ["v3_671b_mtp4", "v2_lite_16b"])
def test_parameters_of_the_units_are_those_of_the_whole(name):
    config = model_config(name)
    counts, units = count_parameters(config), unit_parameters(config)
    assert sum(units.values()) == counts.total
    assert units[Unit("embed")] == config.vocab_size * config.hidden_size
    assert units[Unit("head")] == units[Unit("embed")] + config.hidden_size
    if config.num_nextn_predict_layers:
        assert units[Unit("mtp", 4)] == counts.per_mtp


def test_expert_parallel_ranks_divide_the_routed_experts_alone():
    config = model_config("v3_671b")
    whole, part = unit_parameters(config), unit_parameters(config, 64)
    experts = 256 * 3 * 7168 * 2048
    for unit in (Unit("block", 3), Unit("mtp", 1)):
        assert whole[unit] - part[unit] == experts - experts // 64
    assert all(whole[unit] == part[unit] for unit in (Unit("embed"), Unit("head"), Unit("block", 2)))


def test_initial_values_depend_on_seed_and_name_alone():
    """FAULTS B24: experts differ pairwise; a part of the experts starts as in the whole; norms are 1."""
    config = tiny_config(initializer_range=0.006)
    name, shape = "model.layers.1.mlp.experts.up_proj.weight", torch.Size((8, 10, 24))
    value = initial_value(name, shape, config, 7, torch.float32)
    assert torch.equal(value[:4], initial_value(name, torch.Size((4, 10, 24)), config, 7, torch.float32))
    assert len({expert.numpy().tobytes() for expert in value}) == 8
    assert not torch.equal(value, initial_value(name, shape, config, 8, torch.float32))
    assert not torch.equal(value, initial_value(name.replace("layers.1", "layers.2"), shape, config, 7, torch.float32))
    assert torch.equal(initial_value("model.norm.weight", torch.Size((24,)), config, 7, torch.float32), torch.ones(24))
    large = initial_value("lm_head.weight", torch.Size((500, 200)), config, 7, torch.float64)
    assert large.std().item() == pytest.approx(0.006, rel=0.02) and abs(large.mean().item()) < 1e-4
