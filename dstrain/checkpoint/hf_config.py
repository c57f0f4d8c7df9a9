"""ModelConfig <-> the config.json of a Hugging Face folder (DeepSeek-V3, DeepSeek-V2, Moonlight).

DeepseekV3ForCausalLM means sigmoid scores with a routing bias (noaux_tc), DeepseekV2ForCausalLM softmax scores, greedy
or group-limited, whose top-k weights are not normalised. Every other combination is refused in both directions: no
reader of such a folder would compute what was trained.
"""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from dstrain.config.build import build, show
from dstrain.config.errors import InputError
from dstrain.config.schema import ModelConfig
from dstrain.model.rope import rope_magnitude
from dstrain.precision.fp8_blocks import BLOCK

V3, V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
MODEL_TYPES = {"deepseek_v3": V3, "deepseek_v2": V2}
# Fields of the same name and meaning on both sides.
SAME = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers first_k_dense_replace "
    "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts "
    "n_shared_experts num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor "
    "max_position_embeddings rms_norm_eps initializer_range"
).split()
# What the architecture fixes: absent from config.json, or exactly this.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
}
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
YARN_IGNORED = {"type", "rope_type", "rope_theta", "attention_factor", "truncate"}  # looked at on their own


@dataclass
class Folder:
    """What a config.json says."""

    model: ModelConfig
    rope_interleave: bool  # false: the rows of the rotated dimensions are half-split, not in pairs
    fp8: bool


def to_hugging_face(model: ModelConfig, bos_id: int, eos_id: int, dtype: str, fp8: bool) -> dict:
    """The config.json of `model`; dtype: its "torch_dtype".

    InputError where no Hugging Face architecture computes the model.
    """
    architecture = V3 if model.scoring_func == "sigmoid" else V2
    _supported(architecture, asdict(model), "model.")
    if architecture == V2 and model.hidden_size % model.num_attention_heads:
        raise InputError(
            f"model.hidden_size={model.hidden_size}: transformers' DeepseekV2 takes multiples of "
            f"model.num_attention_heads={model.num_attention_heads} only"
        )
    out: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": next(name for name, value in MODEL_TYPES.items() if value == architecture),
        **{key: getattr(model, key) for key in SAME},
        "num_key_value_heads": model.num_attention_heads,
        "num_nextn_predict_layers": model.num_nextn_predict_layers,
        "scoring_func": model.scoring_func,
        "topk_method": model.topk_method,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        **_rope_out(model),
    }
    if architecture == V3:
        out["rope_interleave"] = True
    if fp8:
        out["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return out


def from_hugging_face(config: dict, name: str, where: str) -> Folder:
    """What a config.json means. name: of the model here; where: of the file, for errors (InputError, one line)."""
    try:
        return _from_hugging_face(config, name)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _from_hugging_face(config: dict, name: str) -> Folder:
    architectures = config.get("architectures") or [MODEL_TYPES.get(config.get("model_type"), config.get("model_type"))]
    architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if architecture not in MODEL_TYPES.values():
        raise InputError(f"unknown architecture {show(architectures)}; valid: {V3} and {V2}")
    for key, value in FIXED.items():
        if config.get(key, value) not in (value, None):
            raise InputError(f"{key}={show(config[key])}: dstrain's models have {show(value)}")

    optional = {"initializer_range": 0.02, "q_lora_rank": None, "first_k_dense_replace": 0}
    routing = {"n_group": 1, "topk_group": 1}
    if architecture == V3:
        routing |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
    else:
        routing |= {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False}
    values = {"name": name, "num_nextn_predict_layers": 0, "mtp_depth_weights": None, **optional}
    for key in (field.name for field in fields(ModelConfig)):
        if config.get(key) is not None and key not in ("name", "mtp_depth_weights", "rope_theta", "rope_scaling"):
            values[key] = config[key]
        elif key in routing:
            values[key] = routing[key]
    if "num_mtp_layers" in config and "num_nextn_predict_layers" not in config:  # transformers' own name of it
        values["num_nextn_predict_layers"] = config["num_mtp_layers"]
    if values["topk_method"] == "greedy":
        values |= {"n_group": 1, "topk_group": 1}  # greedy knows no groups, whatever the file says
    values |= _rope_in(config)
    _supported(architecture, values, "")
    model = build(ModelConfig, values)
    scaling = _scaling(config)
    factor = scaling.get("attention_factor") if scaling else None
    if factor is not None and not math.isclose(factor, rope_magnitude(model), rel_tol=1e-6):
        raise InputError(
            f"rope_scaling.attention_factor={show(factor)}: mscale and mscale_all_dim give {rope_magnitude(model):.7g}"
        )
    interleave = architecture == V2 or config.get("rope_interleave") is not False
    return Folder(model, interleave, _is_fp8(config.get("quantization_config")))


def _supported(architecture: str, values: dict, prefix: str) -> None:
    """InputError unless `values` has the router of `architecture`."""
    scores, methods, norms = {
        V3: ("sigmoid", ("noaux_tc",), (True, False)),
        V2: ("softmax", ("greedy", "group_limited_greedy"), (False,)),
    }[architecture]
    for key, valid in (("scoring_func", (scores,)), ("topk_method", methods), ("norm_topk_prob", norms)):
        if values[key] not in valid:
            raise InputError(
                f"{prefix}{key}={show(values[key])}: {architecture} has {' or '.join(map(show, valid))} "
                f"with {prefix}scoring_func={scores}"
            )


def _rope_out(model: ModelConfig) -> dict:
    """vLLM and SGLang read rope_theta and rope_scaling, older ones by "type"; transformers 5 these or rope_parameters."""
    theta = model.rope_theta
    if model.rope_scaling is None:
        default = {"rope_type": "default", "rope_theta": theta}
        return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": default}
    yarn = model.rope_scaling
    scaling = {"type": "yarn", "rope_type": "yarn", **{key: getattr(yarn, key) for key in YARN}}
    if not yarn.mscale or not yarn.mscale_all_dim:  # transformers takes these two together or not at all
        scaling["attention_factor"] = rope_magnitude(model)
    parameters = {key: value for key, value in scaling.items() if key != "type"} | {"rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def _scaling(config: dict) -> dict | None:
    """The YaRN keys, from rope_scaling or transformers 5's rope_parameters; None where it is off."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not scaling:
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise InputError(f"rope_scaling of type {show(kind)}: valid are yarn and none")
    return scaling


def _rope_in(config: dict) -> dict:
    parameters = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or parameters.get("rope_theta")
    if theta is None:
        raise InputError("missing key 'rope_theta' (number)")
    scaling = _scaling(config)
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    if scaling.get("truncate") is False:
        raise InputError("rope_scaling.truncate=false: dstrain's YaRN rounds the ramp's ends to whole pairs")
    unknown = sorted(scaling.keys() - {*YARN, *YARN_IGNORED})
    if unknown:
        raise InputError(f"rope_scaling has unknown keys {', '.join(unknown)}; valid: {', '.join(YARN)}")
    # Absent means mscale 1 and no factor on the softmax: what the released code and transformers take it for.
    yarn = {"mscale": 1.0, "mscale_all_dim": 0.0} | {key: scaling[key] for key in YARN if scaling.get(key) is not None}
    return {"rope_theta": theta, "rope_scaling": yarn}


def _is_fp8(quantization: dict | None) -> bool:
    """Whether weights are FP8 in 128x128 blocks; InputError for any other quantisation."""
    if not quantization:
        return False
    for key, valid in (
        ("quant_method", ("fp8",)),
        ("fmt", ("e4m3", None)),
        ("weight_block_size", ([BLOCK, BLOCK],)),
        ("activation_scheme", ("dynamic", None)),
    ):
        if quantization.get(key) not in valid:
            found = show(quantization.get(key))
            raise InputError(f"quantization_config.{key}={found}: unknown quantisation, valid is {show(valid[0])}")
    return True
