"""Parameters and floating-point operations of a configuration, counted on the meta device."""

from dataclasses import dataclass

import torch

from dstrain.config.schema import ModelConfig
from dstrain.model.block import Block
from dstrain.model.model import Model
from dstrain.model.mtp import MTPModule
from dstrain.model.unit import Unit, list_units


@dataclass
class Counts:
    main: int  # the main model, without routing biases
    per_mtp: int  # unique to one MTP module
    total: int  # main and all MTP modules
    activated: int  # main parameters that one token uses, embedding and head included
    buffers: int  # routing biases of the main model


def count_parameters(config: ModelConfig) -> Counts:
    """Parameters by kind; nothing is allocated."""
    with torch.device("meta"):
        model = Model(config, torch.bfloat16)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    extra = [sum(p.numel() for p in module.parameters()) for module in model.mtp_modules]
    total = sum(sizes.values())
    main = total - sum(extra)
    idle = sum(p.numel() for block in model.blocks if block.is_moe for p in block.mlp.experts.parameters())
    idle -= idle * config.num_experts_per_tok // config.n_routed_experts
    gates = [block.mlp.gate for block in model.blocks if block.is_moe]
    biases = sum(gate.e_score_correction_bias.numel() for gate in gates if config.has_routing_bias)
    return Counts(main, extra[0] if extra else 0, total, main - idle, biases)


def unit_parameters(config: ModelConfig, ep: int = 1) -> dict[Unit, int]:
    """Parameters that each unit has of its own on one of `ep` expert-parallel ranks; nothing is allocated.

    embed: the embedding; head: the final norm and the projection; an MTP unit: merge, block and norms, without the
    embedding and projection that it shares. All together are `Counts.total` where ep is 1.
    """
    table = config.vocab_size * config.hidden_size
    own = {"embed": table, "head": table + config.hidden_size}
    found = {}
    for unit in list_units(config):
        layer = unit.layer(config)
        key = unit.kind if unit.kind != "block" else f"block, dense {layer < config.first_k_dense_replace}"
        if key not in own:
            kind = MTPModule if unit.kind == "mtp" else Block
            with torch.device("meta"):
                block = kind(config, layer, torch.bfloat16, range(config.n_routed_experts // ep))
            own[key] = sum(parameter.numel() for parameter in block.parameters())
        found[unit] = own[key]
    return found


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs of one trained token: three times those of the forward's matrix products.

    Counted: every Linear a token passes (its top-k and the shared experts, not the idle ones), the gate, the head,
    every MTP module with its head; causal attention over the (L + 1) / 2 keys that a token sees on average.
    Not counted: embedding look-ups, norms, recomputation.
    """
    return sum(unit_flops(config, unit, sequence_length) for unit in list_units(config))


def unit_flops(config: ModelConfig, unit: Unit, sequence_length: int) -> float:
    """The unit's share of `flops_per_token`."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    head = hidden * config.vocab_size
    if unit.kind in ("embed", "head"):
        return 3 * 2 * (head if unit.kind == "head" else 0)
    q_out = heads * config.qk_head_dim
    query = hidden * q_out if config.q_lora_rank is None else config.q_lora_rank * (hidden + q_out)
    key_value = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    key_value += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    core = heads * (config.qk_head_dim + config.v_head_dim) * (sequence_length + 1) / 2
    products = query + key_value + core + heads * config.v_head_dim * hidden
    if unit.layer(config) < config.first_k_dense_replace:
        products += 3 * hidden * config.intermediate_size
    else:
        used = config.num_experts_per_tok + config.n_shared_experts
        products += hidden * config.n_routed_experts + 3 * hidden * config.moe_intermediate_size * used
    if unit.kind == "mtp":
        products += 2 * hidden * hidden + head
    return 3 * 2 * products
