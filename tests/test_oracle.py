"""The oracle is checked before it checks anything: against Hugging Face's DeepseekV3, its MTP modules and DeepseekV2
(logits, losses and gradients of every weight, in float64), and against numbers worked out by hand.

Hugging Face rounds to float32 in norms, router, softmax and RoPE. Here its modules see a `torch` whose float32 is
float64, so the comparison is exact to float64's own rounding.
"""

import math

import oracle as oracle_module
import pytest
import torch
import transformers.models.deepseek_v2.modeling_deepseek_v2 as hf_v2
import transformers.models.deepseek_v3.modeling_deepseek_v3 as hf_v3
from exact_hf import make_exact
from oracle import oracle, random_weights, rms_norm, tiny_config, weight_shapes
from transformers import DeepseekV2Config, DeepseekV3Config, modeling_layers

from dstrain.config.schema import YarnConfig

# rope 8, theta 100, original 64: beta 4 falls on pair 0.81, beta 1 on pair 2.02, so the ramp runs over pairs 0 to 3
# with two pairs inside it; unequal mscales make the magnitude of cos and sin differ from 1.
YARN = dict(
    qk_rope_head_dim=8, rope_theta=100.0, rope_scaling=YarnConfig(4.0, 64, 4.0, 1.0, mscale=0.7, mscale_all_dim=1.3)
)
V2 = dict(topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=16.0)


# ---------------------------------------------------------------- Hugging Face in float64


@pytest.fixture
def exact_hf(monkeypatch):
    make_exact(monkeypatch)


def hf_config(config):
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "yarn", **vars(config.rope_scaling)}
    same = """vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers first_k_dense_replace
        num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts
        n_shared_experts num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor
        max_position_embeddings rms_norm_eps""".split()
    values = {name: getattr(config, name) for name in same}
    values |= dict(num_key_value_heads=config.num_attention_heads, rope_parameters=rope, attn_implementation="eager")
    if config.scoring_func == "softmax":
        return DeepseekV2Config(**values, topk_method=config.topk_method, experts_implementation="eager")
    depth = config.num_nextn_predict_layers
    return DeepseekV3Config(**values, num_nextn_predict_layers=depth, experts_implementation="eager")


def to_hf(config, weights):
    """Our weights under Hugging Face's module names: (main model's, MTP model's). Autograd flows back to ours."""
    main, mtp = {}, {}
    for name, weight in weights.items():
        if name.endswith("experts.up_proj.weight") and "shared" not in name:
            continue  # joined with gate_proj below
        new = name
        if ".experts." in name:
            new = name.replace("down_proj.weight", "down_proj").replace("gate_proj.weight", "gate_up_proj")
            if "gate_proj" in name:
                weight = torch.cat([weight, weights[name.replace("gate_proj", "up_proj")]], dim=1)
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        if layer < config.num_hidden_layers:
            main[new] = weight
            continue
        inner = new.removeprefix(f"model.layers.{layer}.").replace("shared_head.norm", "post_norm")
        if inner.split(".")[0] not in ("post_norm", "enorm", "hnorm", "eh_proj"):
            inner = "mtp_block." + inner
        mtp[f"layers.{layer - config.num_hidden_layers}.{inner}"] = weight
    return main, mtp


def hf_logits(config, weights, tokens):
    """Hugging Face's logits, main then every depth, as functions of our weights."""
    depth = config.num_nextn_predict_layers
    length = tokens.shape[1] - 1 - depth
    main_weights, mtp_weights = to_hf(config, weights)
    cls = hf_v2.DeepseekV2ForCausalLM if config.scoring_func == "softmax" else hf_v3.DeepseekV3ForCausalLM
    model = cls(hf_config(config)).double().eval()
    assert model.config._attn_implementation == "eager"
    have = set(model.state_dict())
    assert have == set(main_weights), have ^ set(main_weights)

    call = torch.func.functional_call
    state = call(model, {**main_weights}, (tokens[:, :length],), {"output_hidden_states": True, "use_cache": False})
    logits, hidden = [state.logits], state.hidden_states[-1]  # the last one is after the final norm
    if not depth:
        return logits

    drafts = modeling_layers.MtpModel(model, depth).double().eval()
    shared = {"embed_tokens.weight": main_weights["model.embed_tokens.weight"]}
    shared["shared_head.weight"] = main_weights["lm_head.weight"]
    assert set(drafts.state_dict()) == {*mtp_weights, *shared}, set(drafts.state_dict()) ^ {*mtp_weights, *shared}
    positions = torch.arange(length)[None]
    drafts.forward = drafts.forward_layer  # one depth on all positions; its own forward drafts one token
    for k in range(depth):
        ids = tokens[:, k + 1 : k + 1 + length]
        hidden = call(drafts, {**mtp_weights, **shared}, (k, hidden, positions, None, ids))
        logits.append(hidden @ main_weights["lm_head.weight"].T)
    return logits


def sample(config, length=11, batch=2, seed=5):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length + 1 + config.num_nextn_predict_layers)
    return torch.randint(config.vocab_size, shape, generator=generator)


def assert_close(ours, theirs, tolerance, name=""):
    """Largest difference, relative to the largest value."""
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < tolerance, name


def assert_equals_hf(config, tolerance=1e-12):
    weights, tokens = random_weights(config, seed=1), sample(config)
    length = tokens.shape[1] - 1 - config.num_nextn_predict_layers
    ours = oracle(config, weights, tokens, balance_alpha=0.0, mtp_weight=0.3)
    theirs = hf_logits(config, weights, tokens)

    losses = []
    for k, logits in enumerate(theirs):
        target = tokens[:, k + 1 : k + 1 + length]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
        assert_close(ours.logits[k], logits, tolerance)
    loss = losses[0]
    if len(losses) > 1:
        loss = loss + 0.3 * sum(w * l for w, l in zip(config.depth_weights, losses[1:], strict=True))
    assert_close(ours.loss, loss, tolerance)

    leaves = {name: weight for name, weight in weights.items() if weight.requires_grad}
    our_gradients = torch.autograd.grad(ours.loss, leaves.values())
    their_gradients = torch.autograd.grad(loss, leaves.values())
    for name, mine, other in zip(leaves, our_gradients, their_gradients, strict=True):
        assert other.abs().max() > 0, f"{name} gets no gradient, so this would prove nothing"
        assert_close(mine, other, 10 * tolerance, name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(q_lora_rank=None, num_nextn_predict_layers=0),
        YARN,
        dict(**YARN, q_lora_rank=None, num_nextn_predict_layers=1),
        dict(n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0),
        dict(n_group=2, topk_group=1, first_k_dense_replace=0, n_shared_experts=1),
        dict(rms_norm_eps=1e-2),  # Hugging Face keeps 1e-6 in the latent norms
    ],
    ids=["groups", "no q_lora", "yarn", "yarn, no q_lora", "one group", "two groups", "eps"],
)
def test_logits_and_gradients_equal_hugging_face_v3_and_its_mtp(exact_hf, changes):
    assert_equals_hf(tiny_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [{}, dict(topk_method="greedy", n_group=1, topk_group=1), dict(**YARN, q_lora_rank=None)],
    ids=["group_limited_greedy", "greedy", "yarn, no q_lora"],
)
def test_logits_and_gradients_equal_hugging_face_v2_with_softmax_scores(exact_hf, changes):
    assert_equals_hf(tiny_config(**{**V2, "num_nextn_predict_layers": 0, **changes}))


# ---------------------------------------------------------------- positions, by hand


def v3_positions(**yarn):
    return tiny_config(
        qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=YarnConfig(40.0, 4096, 32.0, 1.0, **yarn)
    )


def test_yarn_scales_of_v3_are_one_for_cos_and_squared_for_softmax():
    """m = 0.1 ln 40 + 1 = 1.368888; 192^-0.5 = 0.0721688; 0.0721688 m^2 = 0.135234."""
    config = v3_positions(mscale=1.0, mscale_all_dim=1.0)
    assert oracle_module.rope_magnitude(config) == 1.0
    assert oracle_module.softmax_scale(config) == pytest.approx(0.13523, abs=5e-6)
    config.rope_scaling = None
    assert oracle_module.softmax_scale(config) == pytest.approx(0.07217, abs=5e-6)


def test_yarn_scales_with_unequal_mscale():
    """m(1) / m(0.707) = 1.368888 / 1.260804 = 1.0857; m(0.707)^2 = 1.5896."""
    config = v3_positions(mscale=1.0, mscale_all_dim=0.707)
    assert oracle_module.rope_magnitude(config) == pytest.approx(1.0857, abs=5e-5)
    assert oracle_module.softmax_scale(config) * 192**0.5 == pytest.approx(1.5896, abs=5e-5)


def test_yarn_ramp_of_v3_runs_from_pair_10_to_23():
    """64 ln(4096 / (32 * 2 pi)) / (2 ln 1e4) = 10.47, and 22.51 for one turn: pairs up to 10 as trained, from 23 on
    a fortieth, and pair 15 keeps 8/13 of its own and takes 5/13 of the fortieth."""
    config = v3_positions()
    frequencies = oracle_module.inverse_frequencies(config)
    plain = [10000.0 ** (-j / 32) for j in range(32)]
    assert frequencies[:11].tolist() == pytest.approx(plain[:11], rel=1e-14)
    assert frequencies[23:].tolist() == pytest.approx([f / 40 for f in plain[23:]], rel=1e-14)
    assert frequencies[15].item() == pytest.approx(plain[15] * (8 / 13 + 5 / 13 / 40), rel=1e-14)


def test_rope_turns_neighbouring_dims_as_one_pair():
    """Position 3, theta 1e4, four dims: (1, 0) turns by 3 rad, (0, 1) by 0.03 rad."""
    x = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64).reshape(1, 1, 1, 4)
    turned = oracle_module.rotate(x, torch.tensor([[3]]), tiny_config()).flatten().tolist()
    assert turned == pytest.approx([math.cos(3), math.sin(3), -math.sin(0.03), math.cos(0.03)], rel=1e-14)


def test_positions_restart_at_each_document():
    """Padding at the end counts as a document of its own. (Outputs cannot show this: RoPE is relative.)"""
    documents = torch.tensor([[7, 7, 7, 2, 3, 3, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0]])
    assert oracle_module.positions_of(documents).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], list(range(8))]


# ---------------------------------------------------------------- routing, by hand


def test_groups_score_by_their_two_best_biased_experts_and_ties_take_the_lower_index():
    config = tiny_config(num_experts_per_tok=2)
    select = oracle_module.select
    none = [0.0] * 8
    # Groups (0,1) (2,3) (4,5) (6,7): sums 0.9, 1.0, 1.2, 0.8; the best expert, 0, is in a group not kept.
    assert select(config, [0.9, 0.0, 0.5, 0.5, 0.6, 0.6, 0.4, 0.4], none) == [4, 5]
    # The same scores, groups scored by their best expert: groups 0 and 2.
    v2 = tiny_config(num_experts_per_tok=2, **V2)
    assert select(v2, [0.9, 0.0, 0.5, 0.5, 0.6, 0.6, 0.4, 0.4], None) == [0, 4]
    # And without groups.
    assert select(tiny_config(**V2 | {"topk_method": "greedy"}), [0.1, 0.4, 0.3, 0.4, 0, 0, 0, 0.2], None) == [1, 3, 2]
    # All equal: groups 0 and 1, experts 0 and 1.
    assert select(config, [0.5] * 8, none) == [0, 1]


def test_negative_biases_leave_masked_groups_out():
    """All biased scores are below 0, so a mask of 0 instead of -inf would pick experts of dropped groups."""
    bias = [-2.0, -2.0, -3.0, -3.0, -1.5, -1.5, -4.0, -4.0]
    assert oracle_module.select(tiny_config(), [0.5] * 8, bias) == [4, 5, 0]


def routed(config, logits, bias):
    """Ids and weights of one token whose router logits are given."""
    x = torch.zeros(1, 1, config.hidden_size, dtype=torch.float64)
    x[..., 0] = 1.0
    gate = torch.zeros(config.n_routed_experts, config.hidden_size, dtype=torch.float64)
    gate[:, 0] = torch.tensor(logits, dtype=torch.float64)
    w = {"gate.weight": gate, "gate.e_score_correction_bias": torch.tensor(bias, dtype=torch.float64)}
    _, ids, weights = oracle_module.route(config, w, "", x)
    return ids.flatten().tolist(), weights.flatten().tolist()


def test_equal_logits_share_the_scale_equally():
    config = tiny_config(n_group=1, topk_group=1, num_experts_per_tok=8)
    ids, weights = routed(config, [0.3] * 8, [0.0] * 8)
    assert ids == list(range(8)) and weights == pytest.approx([2.5 / 8] * 8, rel=1e-14)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_mixing_weights_come_from_unbiased_scores(norm, scale):
    """Bias 12 forces expert 7 whose score is sigmoid(-18.4) = 1.02e-8; the others have sigmoid(0) = 0.5."""
    config = tiny_config(n_group=1, topk_group=1, norm_topk_prob=norm, routed_scaling_factor=scale)
    ids, weights = routed(config, [0.0] * 7 + [-18.4], [0.0] * 7 + [12.0])
    tiny = 1 / (1 + math.exp(18.4))
    total = 1.0 + tiny if norm else 1.0
    assert ids == [7, 0, 1]
    assert weights == pytest.approx([scale * tiny / total, scale * 0.5 / total, scale * 0.5 / total], rel=1e-12)


def test_balance_loss_by_hand():
    """Two tokens, four experts, K = 1, scores (.8 .4 .4 .4) and (.1 .1 .1 .7): f = 4/(1*2) * (1, 0, 0, 1);
    P_0 = (.4 + .1)/2, P_3 = (.2 + .7)/2; f.P = 2 (.25 + .45) = 1.4. A second sequence with two tokens like the first:
    f_0 = 4, P_0 = .4, so 1.6; the mean is 1.5, or .75 where the global batch has four sequences."""
    config = tiny_config(n_routed_experts=4, num_experts_per_tok=1)
    one, two = [0.8, 0.4, 0.4, 0.4], [0.1, 0.1, 0.1, 0.7]
    scores = torch.tensor([[one, two], [one, one]], dtype=torch.float64)
    assert oracle_module.balance_loss(config, scores, 2).item() == pytest.approx(1.5, rel=1e-14)
    assert oracle_module.balance_loss(config, scores, 4).item() == pytest.approx(0.75, rel=1e-14)


def test_balance_loss_picks_over_all_experts_without_groups():
    """Scores (.9 0 | .5 .5), K = 2, groups scored by their two best, one kept: routing takes experts 2 and 3, the
    loss counts 0 and 2: f = 4/(2*1) * (1, 0, 1, 0), P = scores / 1.9, so 2 * 1.4/1.9."""
    config = tiny_config(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
    scores = [0.9, 0.0, 0.5, 0.5]
    assert oracle_module.select(config, scores, [0.0] * 4) == [2, 3]
    loss = oracle_module.balance_loss(config, torch.tensor([[scores]], dtype=torch.float64), 1)
    assert loss.item() == pytest.approx(2.8 / 1.9, rel=1e-14)


def test_balance_loss_ignores_the_bias():
    """A bias that sends every token to group 3 moves the loads but not the loss of the only MoE layer."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0)
    weights, tokens = random_weights(config, 3), sample(config)
    before = oracle(config, weights, tokens, balance_alpha=1.0, mtp_weight=0.0)
    weights["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.tensor([0.0] * 6 + [9.0] * 2)
    after = oracle(config, weights, tokens, balance_alpha=1.0, mtp_weight=0.0)
    assert after.loads[0][6:].tolist() == [22, 22] and before.loads[0][6:].tolist() != [22, 22]
    assert after.loss_balance == before.loss_balance
    assert after.loss.item() == pytest.approx((after.loss_main + after.loss_balance).item(), rel=1e-14)


def test_loads_count_every_pick_of_every_moe_layer_and_no_padding():
    config = tiny_config()
    weights, tokens = random_weights(config, 3), sample(config)
    result = oracle(config, weights, tokens, balance_alpha=0.0, mtp_weight=0.3)
    assert len(result.loads) == len(result.topk_ids) == len(result.topk_weights) == 2 + 2  # MoE layers, MTP blocks
    assert [int(load.sum()) for load in result.loads] == [2 * 11 * 3] * 4
    documents = torch.zeros_like(tokens)
    documents[1, 6:] = -1
    result = oracle(config, weights, tokens, documents, balance_alpha=0.0, mtp_weight=0.3)
    assert [int(load.sum()) for load in result.loads] == [(11 + 6) * 3] * 4


# ---------------------------------------------------------------- documents, depths, counts


def test_mtp_projection_reads_the_embedding_first():
    """eh_proj = [I, 0] passes the normalised embedding of the *next* token into the block."""
    config = tiny_config(num_nextn_predict_layers=1)
    weights, tokens = random_weights(config, 2), sample(config)
    eye = torch.eye(24, dtype=torch.float64)
    p = "model.layers.3."
    weights[p + "eh_proj.weight"] = torch.cat([eye, 0 * eye], dim=1)
    for name in ("self_attn.o_proj", "mlp.shared_experts.down_proj", "mlp.experts.down_proj"):  # the block passes x on
        weights[f"{p}{name}.weight"] = torch.zeros_like(weights[f"{p}{name}.weight"])
    result = oracle(config, weights, tokens, balance_alpha=0.0, mtp_weight=0.3)
    embedding = weights["model.embed_tokens.weight"][tokens[:, 1:-1]]
    x = rms_norm(embedding, weights[p + "enorm.weight"], 1e-6)
    expected = rms_norm(x, weights[p + "shared_head.norm.weight"], 1e-6) @ weights["lm_head.weight"].T
    assert_close(result.logits[1], expected, 1e-14)


def test_a_document_is_computed_as_if_alone_at_every_depth():
    """Documents of 5 and 6 tokens packed: the second one's logits are those of a run on it alone, and each depth
    counts the targets inside a document: 4 + 5, 3 + 4, 2 + 3."""
    config = tiny_config()
    weights, tokens = random_weights(config, 4), sample(config, batch=1)
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 3])
    arguments = dict(document_mask=True, balance_alpha=0.0, mtp_weight=0.3)
    packed = oracle(config, weights, tokens, documents, **arguments)
    alone = oracle(config, weights, tokens[:, 5:], documents[:, 5:], **arguments)
    for k, count in enumerate((9, 7, 5)):
        assert_close(packed.logits[k][:, 5:], alone.logits[k], 1e-13)
        one, two = ((0, t) for t in (5 - 1 - k, 6 - 1 - k))
        picked = [t for t in range(*one)] + [5 + t for t in range(*two)]
        assert len(picked) == count
        log_p = torch.log_softmax(packed.logits[k][0], dim=-1)
        expected = -sum(log_p[t, tokens[0, t + k + 1]] for t in picked) / count
        assert_close([packed.loss_main, *packed.loss_mtp][k], expected, 1e-13)


def test_without_document_mask_documents_only_mark_padding():
    config = tiny_config()
    weights, tokens = random_weights(config, 4), sample(config)
    documents = torch.arange(tokens.shape[1]).expand_as(tokens) // 4
    plain = oracle(config, weights, tokens, balance_alpha=0.1, mtp_weight=0.3)
    packed = oracle(config, weights, tokens, documents, balance_alpha=0.1, mtp_weight=0.3)
    assert plain.loss == packed.loss


def test_losses_of_parts_with_global_counts_add_up_to_the_whole():
    """Sums over tokens divided by the global count: unequal padding in the two parts must not change the total."""
    config = tiny_config()
    weights, tokens = random_weights(config, 6), sample(config)
    documents = torch.zeros_like(tokens)
    documents[1, 4:] = -1
    arguments = dict(balance_alpha=0.1, mtp_weight=0.3)
    whole = oracle(config, weights, tokens, documents, **arguments)
    counts = [11 + 3, 11 + 2, 11 + 1]  # targets t + k + 1 < 4 of the second sequence
    arguments |= dict(global_counts=counts, global_sequences=2)
    parts = [oracle(config, weights, tokens[i : i + 1], documents[i : i + 1], **arguments) for i in range(2)]
    assert_close(sum(part.loss for part in parts), whole.loss, 1e-14)
    for i in range(4):
        assert torch.equal(sum(part.loads[i] for part in parts), whole.loads[i])
    mtp = 0.7 * whole.loss_mtp[0] + 0.3 * whole.loss_mtp[1]
    assert_close(whole.loss, whole.loss_main + 0.3 * mtp + 0.1 * whole.loss_balance, 1e-14)


def test_weight_names_are_those_of_the_released_layout():
    shapes = weight_shapes(tiny_config(num_nextn_predict_layers=1))
    assert shapes["model.layers.3.eh_proj.weight"] == (24, 48)
    assert shapes["model.layers.1.mlp.experts.down_proj.weight"] == (8, 24, 10)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (20, 24)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (12, 24)
    assert not any("q_a" in name for name in weight_shapes(tiny_config(q_lora_rank=None)))
