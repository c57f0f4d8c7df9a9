"""config.json in both directions. Right values: REFERENCE §1, and transformers' own reading of what we write."""

import dataclasses
import json

import pytest
from transformers import AutoConfig

from dstrain.checkpoint.hf_config import from_hugging_face, to_hugging_face
from dstrain.config.compose import compose
from dstrain.config.overrides import groups
from dstrain.config.schema import ModelConfig, YarnConfig


def model(name: str, **changes) -> ModelConfig:
    return dataclasses.replace(compose("train", [f"model={name}", "run.name=x"])[0].model, **changes)


def there_and_back(config: ModelConfig) -> ModelConfig:
    written = json.loads(json.dumps(to_hugging_face(config, 0, 1, "bfloat16", False)))
    return from_hugging_face(written, config.name, "config.json").model


@pytest.mark.parametrize(
    "yarn", [None, YarnConfig(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)], ids=["plain", "yarn"]
)
@pytest.mark.parametrize("name", groups()["model"])
def test_every_model_comes_back_as_it_went(name, yarn, tmp_path):
    """mtp_depth_weights are a setting of training and have no place in the file."""
    config = model(name, rope_scaling=yarn, mtp_depth_weights=None)
    assert there_and_back(config) == config
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config, 0, 1, "bfloat16", False)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == ("deepseek_v2" if config.scoring_func == "softmax" else "deepseek_v3")
    for key in ("hidden_size", "q_lora_rank", "n_routed_experts", "first_k_dense_replace", "routed_scaling_factor"):
        assert getattr(theirs, key) == getattr(config, key)
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert theirs.rope_parameters["rope_type"] == ("yarn" if yarn else "default")
    # and what transformers makes of it when it saves
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert from_hugging_face(saved, config.name, "config.json").model == config


RELEASED_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1,
    "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_layout_of_v3_is_our_v3():
    found = from_hugging_face(RELEASED_V3, "v3_671b", "config.json")
    yarn = YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    wanted = model("v3_671b", rope_scaling=yarn, max_position_embeddings=163840, initializer_range=0.02)
    assert found.model == wanted and found.fp8 and found.rope_interleave


def test_the_layouts_of_v2_lite_and_moonlight_are_ours():
    changes = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "quantization_config": None,
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "q_lora_rank": None,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
        "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "rope_scaling": RELEASED_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }
    v2 = {key: value for key, value in (RELEASED_V3 | changes).items() if key != "num_nextn_predict_layers"}
    wanted = model("v2_lite_16b", max_position_embeddings=163840, initializer_range=0.02)
    wanted.rope_scaling = YarnConfig(40.0, 4096, 32.0, 1.0, 0.707, 0.707)
    assert from_hugging_face(v2, "v2_lite_16b", "config.json").model == wanted
    changes |= {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840, "intermediate_size": 11264,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.446,
        "rope_scaling": None, "rope_theta": 50000.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 0,
    }
    assert from_hugging_face(RELEASED_V3 | changes, "moonlight_16b", "config.json").model == model("moonlight_16b")


def test_an_attention_factor_that_the_other_keys_do_not_give_is_refused():
    scaling = RELEASED_V3["rope_scaling"]
    same = RELEASED_V3 | {"rope_scaling": scaling | {"attention_factor": 1.0}}
    assert from_hugging_face(same, "x", "config.json").model.rope_scaling.factor == 40.0
    for changes in ({"attention_factor": 1.2}, {"truncate": False}):
        with pytest.raises(ValueError, match="config.json: rope_scaling"):
            from_hugging_face(RELEASED_V3 | {"rope_scaling": scaling | changes}, "x", "config.json")
