"""configs/: every choice is a complete configuration, and the published models have their published sizes."""

import pytest

from dstrain.config.compose import compose
from dstrain.config.overrides import groups
from dstrain.config.schema import ModelConfig
from dstrain.model.unit import list_units


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(name: str) -> ModelConfig:
    return compose("train", [f"model={name}", "run.steps=10"])[0].model


@pytest.mark.parametrize("name", groups()["model"])
def test_every_model_trains_by_one_override(name):
    assert model(name).name == name


@pytest.mark.parametrize("group", [group for group in groups() if group != "model"])
def test_every_choice_composes(group):
    needed = {"text": ["data.text=x"], "files": ["data.train=x"]}
    for choice in groups()[group]:
        more = needed.get(choice, []) if group == "data" else ["model=v3_671b"] if group == "parallel" else []
        config = compose("train", [f"{group}={choice}", *more])[0]
        if group == "precision":
            assert config.precision.name == choice


def attention(m: ModelConfig) -> int:
    """MLA's projections and the two norms of its latents."""
    heads, width = m.num_attention_heads, m.hidden_size
    query = width * heads * m.qk_head_dim
    if m.q_lora_rank is not None:
        query = width * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * heads * m.qk_head_dim
    latent = width * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank
    return query + latent + m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim) + heads * m.v_head_dim * width


def block(m: ModelConfig, dense: bool, experts: int) -> int:
    ffn = 3 * m.hidden_size * m.intermediate_size
    if not dense:
        expert = 3 * m.hidden_size * m.moe_intermediate_size
        ffn = (experts + m.n_shared_experts) * expert + m.n_routed_experts * m.hidden_size
    return attention(m) + ffn + 2 * m.hidden_size


def main_parameters(m: ModelConfig, experts: int | None = None) -> int:
    """Parameters without routing biases, by the published architecture; `experts` a block counted (default: all)."""
    count = m.n_routed_experts if experts is None else experts
    blocks = [block(m, i < m.first_k_dense_replace, count) for i in range(m.num_hidden_layers)]
    return sum(blocks) + 2 * m.vocab_size * m.hidden_size + m.hidden_size


@pytest.mark.parametrize(
    ("name", "published"),
    [("v3_671b", 671_026_404_352), ("v3_671b_mtp4", 671_026_404_352), ("v2_lite_16b", 15_706_484_224)],
)
def test_size_of_the_main_model(name, published):
    """REFERENCE §1: the totals of the released weights."""
    assert main_parameters(model(name)) == published


def test_sizes_of_v3_beside_the_main_model():
    m = model("v3_671b")
    assert main_parameters(m, m.num_experts_per_tok) == 37_552_282_624  # activated, DESIGN §6
    # unique in one MTP module: a block, eh_proj, and the norms of embedding, hidden state and head
    assert block(m, False, m.n_routed_experts) + 2 * m.hidden_size**2 + 3 * m.hidden_size == 11_610_067_968


def test_sizes_in_the_names_of_the_others():
    """V2: 236B with 21B activated (its paper); Moonlight: 16B with 3B activated (its paper's name)."""
    v2, moonlight = model("v2_236b"), model("moonlight_16b")
    assert round(main_parameters(v2) / 1e9) == 236 and round(main_parameters(v2, 6) / 1e9) == 21
    assert round(main_parameters(moonlight) / 1e9) == 16 and round(main_parameters(moonlight, 6) / 1e9) == 3


def test_v3_settings_that_no_size_shows():
    """REFERENCE §1 and §2."""
    m = model("v3_671b")
    assert (m.n_group, m.topk_group, m.num_experts_per_tok, m.routed_scaling_factor) == (8, 4, 8, 2.5)
    assert (m.scoring_func, m.topk_method, m.norm_topk_prob) == ("sigmoid", "noaux_tc", True)
    assert (m.initializer_range, m.rms_norm_eps, m.rope_theta, m.rope_scaling) == (0.006, 1e-6, 1e4, None)
    assert (m.num_nextn_predict_layers, m.max_position_embeddings) == (1, 4096)
    flagship = model("v3_671b_mtp4")
    assert flagship.depth_weights == [0.4, 0.3, 0.2, 0.1]
    assert {k: v for k, v in vars(flagship).items() if getattr(m, k) != v} == {
        "name": "v3_671b_mtp4", "num_nextn_predict_layers": 4, "mtp_depth_weights": [0.4, 0.3, 0.2, 0.1]}


def test_deepseek_v3_recipe_is_the_papers():
    """REFERENCE §2, with DESIGN §3's start of the batch ramp and length of the warm-up."""
    config = compose("train", ["recipe=deepseek_v3"])[0]
    assert config.schedule.tokens == 14.8e12 and config.data.sequence_length == 4096
    assert [(s.until, s.value, s.shape) for s in config.schedule.learning_rate] == [
        (2000 * 3072 * 4096, 2.2e-4, "linear"),
        (10e12, 2.2e-4, "constant"),
        (14.3e12, 2.2e-5, "cosine"),
        (pytest.approx(14.3e12 + 333e9), 2.2e-5, "constant"),
        (pytest.approx(14.3e12 + 333e9 + 167e9), 7.3e-6, "constant"),
    ]
    assert [(s.until, s.value) for s in config.schedule.bias_speed] == [(14.3e12, 0.001), (14.8e12, 0.0)]
    assert [(s.until, s.value) for s in config.schedule.mtp_weight] == [(10e12, 0.3), (14.8e12, 0.1)]
    assert config.batch.sequences == 15360
    assert vars(config.batch.ramp) == {"start": 4096, "until": 469e9, "multiple": 256}
    optim = config.optim
    assert (optim.beta1, optim.beta2, optim.weight_decay, optim.grad_clip) == (0.9, 0.95, 0.1, 1.0)
    assert (optim.moments, optim.balance_alpha) == ("bf16", 1e-4)


def test_every_schedule_reaches_its_last_token():
    from dstrain.config.validate import resolve_until

    for name in groups()["schedule"]:
        schedule = compose("train", [f"schedule={name}"])[0].schedule
        for segments in (schedule.learning_rate, schedule.bias_speed, schedule.mtp_weight):
            assert resolve_until(segments[-1].until, schedule.tokens) == schedule.tokens


@pytest.mark.parametrize(("recipe", "ranks"), [("v2_lite", 8), ("v2", 64), ("deepseek_v3", 2048)])
def test_every_recipe_fits_its_ranks_from_the_first_batch_to_the_last(recipe, ranks):
    from dstrain.parallel.layout import Layout

    config = compose("train", [f"recipe={recipe}"])[0]
    layout = Layout(config, ranks, rank=ranks - 1, local_size=8)
    assert layout.mesh.pp * layout.mesh.edp * layout.mesh.ep == ranks
    assert [unit for stage in layout.partition.stages for unit in stage] == list_units(config.model)
