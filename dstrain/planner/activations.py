"""Bytes that a unit keeps of one micro-batch between its forward and its backward, as the model's code keeps them.

A tensor that several operations keep counts once: the output of a unit belongs to the unit behind, which keeps it as
its input. FP8 keeps what REFERENCE §3 lists: products' inputs as E4M3 tiles, the one after attention as E5M6, and
computes norms, up-projections, heads and SwiGLU's output again.
"""

from dstrain.model.unit import Unit
from dstrain.planner.job import Job

ID = 8  # bytes of an index


def kept_bytes(job: Job, unit: Unit) -> float:
    """Of a unit; blocks follow parallel.recompute."""
    model, tokens, c = job.config.model, job.tokens, job.formats.compute
    hidden = tokens * model.hidden_size * c
    head = 2 * hidden + tokens * job.formats.wide  # the norm's input, the gradient of the state
    if unit.kind == "embed":
        return tokens * ID
    if unit.kind == "head":
        return head
    block = block_bytes(job, unit)
    if job.config.parallel.recompute == "block":  # its input, and the way of its tokens
        is_moe = unit.layer(model) >= model.first_k_dense_replace
        block = hidden + (tokens * model.num_experts_per_tok * (_route_bytes(job) + job.formats.wide) if is_moe else 0)
    if unit.kind == "block":
        return block
    merge = 4 * hidden + 2 * tokens * job.formats.wide  # embedding, state, and both normalised side by side
    return merge + block + head


def block_bytes(job: Job, unit: Unit) -> float:
    """Of a unit's block without recomputation."""
    is_moe = unit.layer(job.config.model) >= job.config.model.first_k_dense_replace
    return attention_bytes(job, is_moe) + experts_bytes(job, is_moe)


def attention_bytes(job: Job, is_moe: bool) -> float:
    model, c, wide = job.config.model, job.formats.compute, job.formats.wide
    hidden, heads = model.hidden_size, model.num_attention_heads
    latents = model.kv_lora_rank + model.qk_rope_head_dim + (model.q_lora_rank or 0)
    value = heads * model.v_head_dim
    norms = 2 * wide  # 1 / rms of the two norms over hidden
    query = heads * model.qk_head_dim if model.q_lora_rank is None else 0
    if job.formats.fp8:
        token = c * (2 * hidden + latents + query) + value * (1.5 + 4 / 128) + norms
    else:
        inner = (model.q_lora_rank or 0) + model.kv_lora_rank  # normalised, as the up-projections' inputs
        latent_norms = (1 if model.q_lora_rank is None else 2) * wide
        # input and residual, each before and after its norm; q, k, v; the input of the last projection
        token = c * (4 * hidden + latents + inner + 2 * heads * model.qk_head_dim + 2 * value) + norms + latent_norms
    if is_moe:
        token += _router_bytes(job)
    return token * job.tokens


def _router_bytes(job: Job) -> float:
    """A token's: scores, their sums, top-k weights and ids on their way, and the gate's input where that is a copy."""
    model, wide = job.config.model, job.formats.wide
    copy = 0 if job.formats.fp8 or job.formats.compute == wide else model.hidden_size * wide
    return copy + model.n_routed_experts * wide + model.num_experts_per_tok * (2 * wide + _route_bytes(job))


def _route_bytes(job: Job) -> int:
    """Of a token's way to one expert: ids and places; where experts are on other ranks too, places at both ends."""
    return 3 * ID + 1 if job.config.parallel.ep == 1 else 6 * ID


def experts_bytes(job: Job, is_moe: bool) -> float:
    """x itself is counted with attention, whose norm gives it."""
    model, c, wide, tiles = job.config.model, job.formats.compute, job.formats.wide, job.formats.tiles
    if not is_moe:
        return job.tokens * model.intermediate_size * (2 * tiles if job.formats.fp8 else 3 * c)
    inner = model.moe_intermediate_size
    shared = job.tokens * model.n_shared_experts * inner
    if job.formats.fp8:
        return job.rows * ((model.hidden_size + 2 * inner) * tiles + wide) + 2 * shared * tiles
    return job.rows * (c * (model.hidden_size + 3 * inner) + wide) + 3 * c * shared


def waiting_bytes(job: Job, unit: Unit) -> float:
    """What a split backward leaves for weight gradients: the products' inputs, the gradients of their outputs."""
    model, c = job.config.model, job.formats.compute
    each = job.formats.tiles if job.formats.fp8 else c
    if unit.kind in ("embed", "head"):
        return 0
    heads, hidden = model.num_attention_heads, model.hidden_size
    value = heads * model.v_head_dim
    down = (heads * model.qk_head_dim if model.q_lora_rank is None else model.q_lora_rank)
    down += model.kv_lora_rank + model.qk_rope_head_dim
    outputs = down + hidden + heads * (model.qk_nope_head_dim + model.v_head_dim)
    outputs += 0 if model.q_lora_rank is None else heads * model.qk_head_dim
    inputs = hidden + value + (model.q_lora_rank or 0) + model.kv_lora_rank
    total = job.tokens * each * (outputs + inputs)
    inner = model.moe_intermediate_size
    if unit.layer(model) < model.first_k_dense_replace:
        total += job.tokens * each * (2 * hidden + 3 * model.intermediate_size)
    else:
        routed, shared = 2 * hidden + 3 * inner, 2 * hidden + 3 * model.n_shared_experts * inner
        total += (job.rows * routed + job.tokens * shared) * each
    return total + (3 * hidden * c * job.tokens if unit.kind == "mtp" else 0)
