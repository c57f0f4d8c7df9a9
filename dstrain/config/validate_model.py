"""Checks of a model's sizes against each other."""

import math

from dstrain.config.checks import LARGEST_COUNT, LARGEST_SIZE, MOST_LAYERS, at_least, from_to, one_of, positive
from dstrain.config.errors import InputError
from dstrain.config.schema import ModelConfig, YarnConfig


def check_model(model: ModelConfig) -> None:
    """InputError for a model that cannot be built."""
    for key in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank",
                "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        from_to(f"model.{key}", getattr(model, key), 1, LARGEST_SIZE)
    for key in ("num_attention_heads", "n_routed_experts", "n_shared_experts"):
        from_to(f"model.{key}", getattr(model, key), 1, LARGEST_COUNT)
    for key in ("num_experts_per_tok", "n_group", "topk_group", "max_position_embeddings"):
        at_least(f"model.{key}", getattr(model, key), 1)
    from_to("model.num_hidden_layers", model.num_hidden_layers, 1, MOST_LAYERS)
    if model.q_lora_rank is not None:
        from_to("model.q_lora_rank", model.q_lora_rank, 1, LARGEST_SIZE, "null (a plain query projection) or ")
    for key in ("routed_scaling_factor", "rope_theta", "rms_norm_eps"):
        positive(f"model.{key}", getattr(model, key))
    at_least("model.initializer_range", model.initializer_range, 0)
    if model.qk_rope_head_dim % 2:
        raise InputError(f"model.qk_rope_head_dim={model.qk_rope_head_dim}: must be even, RoPE rotates pairs")
    if not 0 <= model.first_k_dense_replace <= model.num_hidden_layers:
        raise InputError(f"model.first_k_dense_replace={model.first_k_dense_replace}: must be from 0 to "
                         f"model.num_hidden_layers={model.num_hidden_layers}")
    _router(model)
    _mtp(model)
    if model.rope_scaling is not None:
        _yarn(model.rope_scaling)


def _router(model: ModelConfig) -> None:
    one_of("model.scoring_func", model.scoring_func, ("sigmoid", "softmax"))
    one_of("model.topk_method", model.topk_method, ("noaux_tc", "group_limited_greedy", "greedy"))
    experts, groups, kept = model.n_routed_experts, model.n_group, model.topk_group
    if model.topk_method == "greedy" and groups != 1:
        raise InputError(f"model.n_group={groups}: must be 1 with model.topk_method=greedy, which knows no groups")
    if experts % groups:
        raise InputError(f"model.n_routed_experts={experts}: must be divisible by model.n_group={groups}")
    if kept > groups:
        raise InputError(f"model.topk_group={kept}: must be at most model.n_group={groups}")
    if model.topk_method == "noaux_tc" and groups > 1 and experts // groups < 2:
        raise InputError(f"model.n_routed_experts={experts} in model.n_group={groups}: model.topk_method=noaux_tc "
                         "scores a group by its two best experts, so a group needs at least 2")
    if model.num_experts_per_tok > experts // groups * kept:
        raise InputError(f"model.num_experts_per_tok={model.num_experts_per_tok}: must be at most "
                         f"{experts // groups * kept}, the experts in the kept groups "
                         f"(model.n_routed_experts={experts} / model.n_group={groups} * model.topk_group={kept})")


def _mtp(model: ModelConfig) -> None:
    depth, weights = model.num_nextn_predict_layers, model.mtp_depth_weights
    from_to("model.num_nextn_predict_layers", depth, 0, MOST_LAYERS)
    if weights is None:
        return
    if len(weights) != depth or not weights:
        raise InputError(f"model.mtp_depth_weights={weights}: must be null or one weight for each of "
                         f"model.num_nextn_predict_layers={depth}")
    if any(weight < 0 for weight in weights) or not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise InputError(f"model.mtp_depth_weights={weights}: must be at least 0 and sum to 1, not {sum(weights):g}")


def _yarn(yarn: YarnConfig) -> None:
    where = "model.rope_scaling"
    at_least(f"{where}.factor", yarn.factor, 1)
    at_least(f"{where}.original_max_position_embeddings", yarn.original_max_position_embeddings, 1)
    positive(f"{where}.beta_slow", yarn.beta_slow)
    if yarn.beta_fast <= yarn.beta_slow:
        raise InputError(f"{where}.beta_fast={yarn.beta_fast}: must be above {where}.beta_slow={yarn.beta_slow}")
    at_least(f"{where}.mscale", yarn.mscale, 0)
    at_least(f"{where}.mscale_all_dim", yarn.mscale_all_dim, 0)
