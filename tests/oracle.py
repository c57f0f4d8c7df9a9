"""The oracle: DeepSeek-V3's equations computed slowly and literally in float64, to compare the real model with.

Written from the papers alone (DeepSeek-V2 arXiv 2405.04434 §2.1 and appendix C, DeepSeek-V3 arXiv 2412.19437 §2,
YaRN arXiv 2309.00071 §3) and from nothing in `dstrain.model`: an error would have to be made twice to hide. Plain
torch operations, so autograd gives the gradient of every weight. `tests/test_oracle.py` checks this file itself
against Hugging Face's DeepseekV3, its MTP modules and DeepseekV2.

Symbols in shapes: B sequences, L positions, D MTP depth, H heads, E experts, K experts per token, V vocabulary.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dstrain.config.schema import ModelConfig, YarnConfig

# The official code builds the two latent norms with RMSNorm's default eps, whatever `rms_norm_eps` is.
LATENT_EPS = 1e-6


@dataclass
class Result:
    """What a forward pass gives. Lists over MoE layers have the MTP blocks last."""

    logits: list[Tensor]  # D + 1 of [B, L, V]: main, then every MTP depth
    loss: Tensor
    loss_main: Tensor
    loss_mtp: list[Tensor]  # D scalars, unweighted
    loss_balance: Tensor  # unweighted
    loads: list[Tensor] = field(default_factory=list)  # per MoE layer: int64 [E], tokens that picked each expert
    topk_ids: list[Tensor] = field(default_factory=list)  # per MoE layer: int64 [B, L, K], best first
    topk_weights: list[Tensor] = field(default_factory=list)  # per MoE layer: [B, L, K]


# ---------------------------------------------------------------- elementary functions


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in], weight [out, in] -> [..., out]."""
    return torch.einsum("...i,oi->...o", x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(SiLU(gate x) * up x), SiLU(z) = z * sigmoid(z)."""
    z = linear(x, gate)
    return linear(z * torch.sigmoid(z) * linear(x, up), down)


# ---------------------------------------------------------------- positions (RoPE and YaRN)


def yarn_mscale(scale: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0


def yarn_correction_range(dim: int, theta: float, yarn: YarnConfig) -> tuple[int, int]:
    """Pair indices between which the ramp runs: where a pair makes beta_fast, then beta_slow turns over the original
    length. theta^(2j/dim) * 2 pi is pair j's wavelength, so turns(j) = original / wavelength solved for j.
    """

    def pair_with(turns: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(pair_with(yarn.beta_fast)), 0), min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair, [qk_rope_head_dim / 2]."""
    dim, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    result = []
    for j in range(dim // 2):
        frequency = theta ** (-2.0 * j / dim)
        if yarn is not None:
            low, high = yarn_correction_range(dim, theta, yarn)
            width = high - low if high != low else 0.001
            ramp = min(max((j - low) / width, 0.0), 1.0)  # 0: as trained (fast pairs), 1: fully interpolated
            frequency = frequency * (1 - ramp) + frequency / yarn.factor * ramp
        result.append(frequency)
    return torch.tensor(result, dtype=torch.float64)


def rope_magnitude(config: ModelConfig) -> float:
    """What cos and sin are multiplied with."""
    yarn = config.rope_scaling
    if yarn is None:
        return 1.0
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    scale, yarn = config.qk_head_dim**-0.5, config.rope_scaling
    return scale if yarn is None else scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def rotate(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """RoPE on pairs: dims (2j, 2j+1) turn by position * frequency j. x [B, L, H, rope], positions [B, L]."""
    angle = positions[:, :, None, None].double() * inverse_frequencies(config)
    cos, sin = torch.cos(angle) * rope_magnitude(config), torch.sin(angle) * rope_magnitude(config)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def positions_of(documents: Tensor) -> Tensor:
    """Position of each token counted from the start of its document. documents [B, L] -> int64 [B, L]."""
    positions = torch.zeros_like(documents)
    for b in range(documents.shape[0]):
        for t in range(1, documents.shape[1]):
            positions[b, t] = positions[b, t - 1] + 1 if documents[b, t] == documents[b, t - 1] else 0
    return positions


# ---------------------------------------------------------------- attention (MLA, V2 §2.1)


def attention(config: ModelConfig, w: dict[str, Tensor], prefix: str, x: Tensor, positions: Tensor, allowed: Tensor):
    """x [B, L, hidden] -> [B, L, hidden]. positions [B, L]; allowed [B, L, L] bool: query t may see key s."""
    B, L, _ = x.shape
    H, nope = config.num_attention_heads, config.qk_nope_head_dim

    if config.q_lora_rank is None:
        q = linear(x, w[prefix + "q_proj.weight"])
    else:
        c_q = rms_norm(linear(x, w[prefix + "q_a_proj.weight"]), w[prefix + "q_a_layernorm.weight"], LATENT_EPS)
        q = linear(c_q, w[prefix + "q_b_proj.weight"])
    q = q.reshape(B, L, H, config.qk_head_dim)
    q_nope, q_rope = q[..., :nope], rotate(q[..., nope:], positions, config)

    joint = linear(x, w[prefix + "kv_a_proj_with_mqa.weight"])
    c_kv = rms_norm(joint[..., : config.kv_lora_rank], w[prefix + "kv_a_layernorm.weight"], LATENT_EPS)
    k_rope = rotate(joint[..., None, config.kv_lora_rank :], positions, config)[:, :, 0]  # one key for all heads
    kv = linear(c_kv, w[prefix + "kv_b_proj.weight"]).reshape(B, L, H, nope + config.v_head_dim)
    k_nope, v = kv[..., :nope], kv[..., nope:]

    heads = []
    for h in range(H):
        logits = torch.einsum("btd,bsd->bts", q_nope[:, :, h], k_nope[:, :, h])
        logits = (logits + torch.einsum("btd,bsd->bts", q_rope[:, :, h], k_rope)) * softmax_scale(config)
        probabilities = torch.softmax(logits.masked_fill(~allowed, -math.inf), dim=-1)
        heads.append(torch.einsum("bts,bsd->btd", probabilities, v[:, :, h]))
    return linear(torch.cat(heads, dim=-1), w[prefix + "o_proj.weight"])


# ---------------------------------------------------------------- routing (V3 §2.1.2)


def best(values: list[float], count: int) -> list[int]:
    """Indices of the `count` largest values, largest first; of equal values the lower index first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def select(config: ModelConfig, scores: list[float], bias: list[float] | None) -> list[int]:
    """The K experts of one token. scores: E unbiased scores; bias: E values under noaux_tc, else None."""
    E, K = config.n_routed_experts, config.num_experts_per_tok
    choice = list(scores) if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    if config.topk_method != "greedy":
        members = 2 if config.topk_method == "noaux_tc" else 1  # whose choice scores make up the group's
        size = E // config.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(config.n_group)]
        group_scores = [sum(sorted(group, reverse=True)[:members]) for group in groups]
        kept = best(group_scores, config.topk_group)
        choice = [value if i // size in kept else -math.inf for i, value in enumerate(choice)]
    return best(choice, K)


def route(config: ModelConfig, w: dict[str, Tensor], prefix: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, L, hidden] -> scores [B, L, E], ids int64 [B, L, K], mixing weights [B, L, K]."""
    logits = linear(x, w[prefix + "gate.weight"])
    scores = torch.sigmoid(logits) if config.scoring_func == "sigmoid" else torch.softmax(logits, dim=-1)
    bias = w[prefix + "gate.e_score_correction_bias"].tolist() if config.has_routing_bias else None
    ids = torch.tensor([[select(config, token, bias) for token in sequence] for sequence in scores.tolist()])
    weights = torch.gather(scores, -1, ids)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return scores, ids, weights * config.routed_scaling_factor


def balance_loss(config: ModelConfig, scores: Tensor, sequences: int) -> Tensor:
    """Sequence-wise loss of one layer without alpha (V3 eq. 17-20), divided by `sequences` of the global batch."""
    B, L, E = scores.shape
    K = config.num_experts_per_tok
    total = scores.new_zeros(())
    for b in range(B):
        picked = [0] * E
        for token in scores[b].tolist():
            for i in best(token, K):
                picked[i] += 1
        f = torch.tensor(picked, dtype=torch.float64) * E / (K * L)
        p = (scores[b] / scores[b].sum(dim=-1, keepdim=True)).mean(dim=0)
        total = total + (f * p).sum()
    return total / sequences


def moe(config: ModelConfig, w: dict[str, Tensor], prefix: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Shared experts on every token plus the weighted sum of each token's K routed experts. x [B, L, hidden]."""
    shared = [w[prefix + f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
    out = swiglu(x, *shared)
    for e in range(config.n_routed_experts):
        expert = [w[prefix + f"experts.{name}_proj.weight"][e] for name in ("gate", "up", "down")]
        share = (weights * (ids == e)).sum(dim=-1, keepdim=True)  # 0 where the token did not pick e
        out = out + share * swiglu(x, *expert)
    return out


# ---------------------------------------------------------------- the model


def _block(config: ModelConfig, w: dict[str, Tensor], layer: int, x: Tensor, where: dict, result: Result) -> Tensor:
    """One pre-norm block on the residual stream x [B, L, hidden]; adds its routing to `result`."""
    prefix = f"model.layers.{layer}."
    normed = rms_norm(x, w[prefix + "input_layernorm.weight"], config.rms_norm_eps)
    x = x + attention(config, w, prefix + "self_attn.", normed, where["positions"], where["allowed"])
    normed = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
    prefix += "mlp."
    if layer < config.first_k_dense_replace:
        return x + swiglu(normed, *[w[prefix + f"{name}_proj.weight"] for name in ("gate", "up", "down")])

    scores, ids, weights = route(config, w, prefix, normed)
    result.loads.append(torch.bincount(ids[where["real"]].flatten(), minlength=config.n_routed_experts))
    result.topk_ids.append(ids)
    result.topk_weights.append(weights)
    result.loss_balance = result.loss_balance + balance_loss(config, scores, where["sequences"])
    return x + moe(config, w, prefix, normed, ids, weights)


def oracle(
    config: ModelConfig,
    weights: dict[str, Tensor],
    tokens: Tensor,
    documents: Tensor | None = None,
    *,
    document_mask: bool = False,
    balance_alpha: float,
    mtp_weight: float,
    global_counts: list[int] | None = None,
    global_sequences: int | None = None,
) -> Result:
    """Forward pass and loss of V3 §2.2 (eq. 21-25) in float64.

    weights: Hugging Face names, see `weight_shapes`. tokens: int64 [B, L + 1 + D]. documents: the same shape, the
    document of each token, -1 for padding (None: all one document). document_mask: attention, positions and targets
    stay inside a document. global_counts: valid targets per depth of the global batch, D + 1 of them, and
    global_sequences its sequences, where this is only a part of it. Padding counts in no load and no target.
    """
    D = config.num_nextn_predict_layers
    B, L = tokens.shape[0], tokens.shape[1] - 1 - D
    if documents is None:
        documents = torch.zeros_like(tokens)
    w = {name: weight.double() for name, weight in weights.items()}
    eps = config.rms_norm_eps

    here = documents[:, :L]
    allowed = torch.ones(L, L, dtype=torch.bool).tril().expand(B, L, L)
    positions = torch.arange(L).expand(B, L)
    if document_mask:
        allowed = allowed & (here[:, :, None] == here[:, None, :])
        positions = positions_of(here)
    sequences = B if global_sequences is None else global_sequences
    where = {"positions": positions, "allowed": allowed, "real": here != -1, "sequences": sequences}

    zero = torch.zeros((), dtype=torch.float64)
    result = Result(logits=[], loss=zero, loss_main=zero, loss_mtp=[], loss_balance=zero)
    embedding, head = w["model.embed_tokens.weight"], w["lm_head.weight"]

    x = embedding[tokens[:, :L]]
    for layer in range(config.num_hidden_layers):
        x = _block(config, w, layer, x, where, result)
    state = rms_norm(x, w["model.norm.weight"], eps)
    result.logits.append(linear(state, head))

    for k in range(1, D + 1):
        layer = config.num_hidden_layers + k - 1
        prefix = f"model.layers.{layer}."
        enormed = rms_norm(embedding[tokens[:, k : k + L]], w[prefix + "enorm.weight"], eps)
        hnormed = rms_norm(state, w[prefix + "hnorm.weight"], eps)
        x = linear(torch.cat([enormed, hnormed], dim=-1), w[prefix + "eh_proj.weight"])
        x = _block(config, w, layer, x, where, result)
        state = rms_norm(x, w[prefix + "shared_head.norm.weight"], eps)
        result.logits.append(linear(state, head))

    losses = []
    for k, logits in enumerate(result.logits):
        there = documents[:, k + 1 : k + 1 + L]
        valid = (here != -1) & (there != -1)
        if document_mask:
            valid = valid & (here == there)
        count = int(valid.sum()) if global_counts is None else global_counts[k]
        log_p = torch.log_softmax(logits, dim=-1)[valid]
        target = tokens[:, k + 1 : k + 1 + L][valid]
        losses.append(-torch.gather(log_p, -1, target[:, None]).sum() / max(count, 1))

    result.loss_main, result.loss_mtp = losses[0], losses[1:]
    result.loss = result.loss_main + balance_alpha * result.loss_balance
    if D:
        for w_k, loss in zip(config.depth_weights, result.loss_mtp, strict=True):
            result.loss = result.loss + mtp_weight * w_k * loss
    return result


# ---------------------------------------------------------------- inputs for tests


def tiny_config(**overrides) -> ModelConfig:
    """A model small enough to differentiate in a blink, with every feature on and no two sizes equal by accident."""
    values = dict(
        name="oracle-tiny",
        vocab_size=61,
        hidden_size=24,
        intermediate_size=32,
        moe_intermediate_size=10,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        num_nextn_predict_layers=2,
        mtp_depth_weights=[0.7, 0.3],
    )
    if "num_nextn_predict_layers" in overrides and "mtp_depth_weights" not in overrides:
        values["mtp_depth_weights"] = None
    return ModelConfig(**{**values, **overrides})


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape; matrices are [out, in], stacked experts [E, out, in]."""
    c, hidden, H = config, config.hidden_size, config.num_attention_heads
    shapes = {"model.embed_tokens.weight": (c.vocab_size, hidden), "lm_head.weight": (c.vocab_size, hidden)}
    shapes["model.norm.weight"] = (hidden,)

    def mlp(prefix: str, width: int, *stack: int) -> None:
        shapes[prefix + "gate_proj.weight"] = shapes[prefix + "up_proj.weight"] = (*stack, width, hidden)
        shapes[prefix + "down_proj.weight"] = (*stack, hidden, width)

    for layer in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        p = f"model.layers.{layer}."
        if layer >= c.num_hidden_layers:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                shapes[f"{p}{name}.weight"] = (hidden,)
            shapes[p + "eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        a = p + "self_attn."
        if c.q_lora_rank is None:
            shapes[a + "q_proj.weight"] = (H * c.qk_head_dim, hidden)
        else:
            shapes[a + "q_a_proj.weight"] = (c.q_lora_rank, hidden)
            shapes[a + "q_a_layernorm.weight"] = (c.q_lora_rank,)
            shapes[a + "q_b_proj.weight"] = (H * c.qk_head_dim, c.q_lora_rank)
        shapes[a + "kv_a_proj_with_mqa.weight"] = (c.kv_lora_rank + c.qk_rope_head_dim, hidden)
        shapes[a + "kv_a_layernorm.weight"] = (c.kv_lora_rank,)
        shapes[a + "kv_b_proj.weight"] = (H * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        shapes[a + "o_proj.weight"] = (hidden, H * c.v_head_dim)
        if layer < c.first_k_dense_replace:
            mlp(p + "mlp.", c.intermediate_size)
            continue
        shapes[p + "mlp.gate.weight"] = (c.n_routed_experts, hidden)
        if c.has_routing_bias:
            shapes[p + "mlp.gate.e_score_correction_bias"] = (c.n_routed_experts,)
        mlp(p + "mlp.experts.", c.moe_intermediate_size, c.n_routed_experts)
        mlp(p + "mlp.shared_experts.", c.moe_intermediate_size * c.n_shared_experts)
    return shapes


def random_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Float64 leaves for `oracle`: matrices that keep magnitudes near 1, norms 1 ± 0.2; routing biases ± 0.1 without
    gradient."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.1 * noise
        elif len(shape) == 1:
            weights[name] = (1 + 0.2 * noise).requires_grad_()
        else:
            fan_in = 1 if name == "model.embed_tokens.weight" else shape[-1]
            weights[name] = (noise / fan_in**0.5).requires_grad_()
    return weights
