"""transformers' DeepseekV3 (V2 for softmax scores) and dstrain compute the same from the same folder.

The right values are transformers' own: logits at every position, the gradients of the mean cross-entropy, greedy text.
Ours come from a checkpoint that went out by `export` and back in by `import`, so both directions are under test.
"""

import itertools
import json

import pytest
import torch
import transformers
from exact_hf import make_exact
from hf_folders import export, import_, model_of, tensors, write_checkpoint
from oracle import tiny_config
from small_models import caught_logits, sample
from transformers.modeling_layers import MtpModel

from dstrain.cli import main
from dstrain.config.schema import YarnConfig
from dstrain.data.tokenizer import Tokenizer
from dstrain.model import units
from dstrain.model.batch import MicroBatch
from dstrain.model.loss import LossSums, LossWeights
from dstrain.parallel.dispatch import LocalDispatcher

# As in test_oracle: the ramp runs over pairs 0 to 3 with two inside it, and cos and sin are scaled.
ROPE = {"qk_rope_head_dim": 8, "rope_theta": 100.0, "max_position_embeddings": 256}
YARN = YarnConfig(4.0, 64, 4.0, 1.0, mscale=0.7, mscale_all_dim=1.3)
LENGTHS = (24, 80)  # on both sides of YaRN's original length
GROUPS = {"n_group": 4, "topk_group": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
SOFTMAX = {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0}

CHOICES = {
    "query": {"q-lora": {}, "q-plain": {"q_lora_rank": None}},
    "router": {
        "sigmoid-groups": GROUPS,
        "sigmoid-one-group": ONE_GROUP | {"norm_topk_prob": False},
        "softmax-groups": GROUPS | SOFTMAX | {"topk_method": "group_limited_greedy"},
        "softmax-greedy": ONE_GROUP | SOFTMAX | {"topk_method": "greedy"},
    },
    "yarn": {"plain": {}, "yarn": {"rope_scaling": YARN}},
    "shared": {"shared1": {"n_shared_experts": 1}, "shared2": {"n_shared_experts": 2}},
    "mtp": {f"mtp{d}": {"num_nextn_predict_layers": d, "mtp_depth_weights": None} for d in range(3)},
}


def grid():
    """A quarter of all combinations, in which every pair of choices still occurs."""
    for numbers in itertools.product(*(range(len(options)) for options in CHOICES.values())):
        if (numbers[0] + numbers[1] + 2 * numbers[2] + 2 * numbers[3] + numbers[4]) % 4 == 0:
            names = [list(options)[i] for options, i in zip(CHOICES.values(), numbers)]
            changes = {k: v for options, name in zip(CHOICES.values(), names) for k, v in options[name].items()}
            yield pytest.param(changes, id=" ".join(names))


def test_the_grid_holds_every_pair_of_choices():
    seen = {pair for case in grid() for pair in itertools.combinations(case.id.split(), 2)}
    groups = [list(options) for options in CHOICES.values()]
    assert seen == {pair for a, b in itertools.combinations(groups, 2) for pair in itertools.product(a, b)}


def hugging_face(folder, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.to(dtype).eval()


def ours(model, tokens, documents):
    """Logits [B, L, V] of every depth, caught where the heads compute them; gradients of the main loss alone are
    in main_grad."""
    depth = model.config.num_nextn_predict_layers
    batch = MicroBatch(tokens, documents, depth, False)
    weights = LossWeights.of_batch(batch.valid_counts().tolist(), len(tokens), 0.0, model.config.depth_weights, 0.0)
    with caught_logits() as caught:
        units.forward_backward(model, batch, LocalDispatcher(), LossSums(depth, torch.device("cpu")), weights, False)
    return [logits.unflatten(0, (len(tokens), -1)) for logits in caught]


def their_gradients(hf, model):
    """Theirs under our names: gate and up projections of the experts are one parameter there."""
    theirs = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name in model.state_dict():
        if name in theirs or ".experts." not in name:
            continue
        stack, kind = name.removesuffix(".weight").rsplit(".", 1)
        if kind == "down_proj":
            theirs[name] = theirs.get(f"{stack}.down_proj")
        elif (joined := theirs.get(f"{stack}.gate_up_proj")) is not None:
            theirs[name] = joined.chunk(2, dim=1)[0 if kind == "gate_proj" else 1]
    return theirs


def assert_agree(folder, checkpoint, dtype, tolerance, gradient_tolerance=None):
    """gradient_tolerance None: their weights have their rows in another order, so only logits are compared."""
    model, hf = model_of(checkpoint, dtype), hugging_face(folder, dtype)
    for length in LENGTHS:
        tokens, documents = sample(model.config, length=length)
        hf.zero_grad()
        for parameter in model.parameters():
            parameter.main_grad.zero_()
        mine = ours(model, tokens, documents * 0)[0]
        logits = hf(tokens[:, :length], use_cache=False).logits
        assert mine.shape == logits.shape and mine.dtype == logits.dtype == dtype
        torch.testing.assert_close(mine, logits.detach(), rtol=tolerance, atol=tolerance)
        if gradient_tolerance is None:
            continue
        targets = tokens[:, 1 : 1 + length]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).backward()
        theirs = their_gradients(hf, model)
        last = model.config.num_hidden_layers
        for name, parameter in model.named_parameters():
            if name.startswith("model.layers.") and int(name.split(".")[2]) >= last:
                continue  # MTP modules, which transformers' main model has not
            scale = theirs[name].abs().max()
            error = ((parameter.main_grad - theirs[name]).abs().max() / scale).item()
            assert scale > 0 and error < gradient_tolerance, f"{name}: {error}"


@pytest.mark.parametrize("changes", grid())
def test_logits_and_gradients_equal_transformers_and_the_way_back_is_bit_equal(changes, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_config(**ROPE, **changes))
    folder = export(checkpoint, tmp_path / "hf")
    back = import_(folder, tmp_path / "back")
    before, after = tensors(checkpoint), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert_agree(folder, back, torch.float32, 1e-4, 1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"rope_scaling": YARN}, {"q_lora_rank": None, "rms_norm_eps": 1e-5}]
    + [CHOICES["router"][name] | {"rope_scaling": YARN} for name in ("softmax-groups", "softmax-greedy")],
    ids=["v3 yarn", "moonlight", "v2 groups yarn", "v2 greedy yarn"],
)
def test_in_float64_they_agree_to_its_rounding(changes, tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_config(**ROPE, **changes))
    folder = export(checkpoint, tmp_path / "hf")
    make_exact(monkeypatch)
    assert_agree(folder, import_(folder, tmp_path / "back"), torch.float64, 1e-9, 1e-9)


def test_yarn_keys_that_a_folder_leaves_out_mean_what_they_mean_to_transformers(tmp_path):
    """Without mscale and mscale_all_dim: cos and sin are scaled by 0.1 ln(factor) + 1, the softmax is not."""
    yarn = YarnConfig(4.0, 64)
    folder = export(write_checkpoint(tmp_path / "run", tiny_config(**ROPE, rope_scaling=yarn)), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    back = import_(folder, tmp_path / "back")
    assert model_of(back, torch.float32).config.rope_scaling == YarnConfig(4.0, 64, 32.0, 1.0, 1.0, 0.0)
    assert_agree(folder, back, torch.float32, 1e-4, 1e-4)


def test_transformers_loads_the_mtp_modules_of_an_export_and_drafts_the_same_logits(tmp_path):
    """FAULTS B18 and B19: names, order of [embedding, hidden], and the state after the norm. transformers looks for
    layer 61 only, so here it is told which layers are MTP's."""
    config = tiny_config(**ROPE, rope_scaling=YARN)
    folder = export(write_checkpoint(tmp_path / "run", config), tmp_path / "hf")
    model, hf = model_of(import_(folder, tmp_path / "back"), torch.float32), hugging_face(folder)
    hf._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\..*"]
    drafts = MtpModel.from_pretrained(hf).eval()
    length = LENGTHS[1]
    tokens, documents = sample(config, length=length)
    hidden = hf.model(tokens[:, :length]).last_hidden_state
    mine = ours(model, tokens, documents * 0)
    for k in range(2):
        ids = tokens[:, k + 1 : k + 1 + length]
        hidden = drafts.forward_layer(k, hidden, torch.arange(length)[None], None, ids)
        torch.testing.assert_close(mine[k + 1], hf.lm_head(hidden).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mscale, all_dim", [(1.0, 0.0), (0.707, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_yarn_without_one_of_its_factors_is_computed_alike(mscale, all_dim, tmp_path):
    """FAULTS B01's kind: transformers takes mscale and mscale_all_dim together or not at all."""
    yarn = YarnConfig(4.0, 64, 4.0, 1.0, mscale=mscale, mscale_all_dim=all_dim)
    folder = export(write_checkpoint(tmp_path / "run", tiny_config(**ROPE, rope_scaling=yarn)), tmp_path / "hf")
    assert_agree(folder, import_(folder, tmp_path / "back"), torch.float32, 1e-4, 1e-4)


@pytest.mark.parametrize(
    "version, interleave", [("v3", True), ("v3 q-plain", True), ("v2", True), ("v3", False), ("v3 q-plain", False)]
)
def test_a_folder_that_transformers_wrote_imports_and_agrees(version, interleave, tmp_path, capsys):
    """FAULTS B03: rope_interleave=false has the rotated rows half-split; only V3 knows it. A saved V3 still announces
    an MTP module, whose weights transformers does not save."""
    sizes = dict(
        vocab_size=61, hidden_size=24, intermediate_size=32, moe_intermediate_size=10, num_hidden_layers=3,
        first_k_dense_replace=1, num_attention_heads=4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=6, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, initializer_range=0.2,
        q_lora_rank=None if "plain" in version else 12, num_key_value_heads=4,
    )
    torch.manual_seed(1)
    if version == "v2":
        config = transformers.DeepseekV2Config(**sizes)
    else:
        config = transformers.DeepseekV3Config(**sizes, n_group=4, topk_group=2, rope_interleave=interleave)
    hf = transformers.AutoModelForCausalLM.from_config(config)
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    folder = tmp_path / "hf"
    hf.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    checkpoint = import_(folder, tmp_path / "back")
    said = capsys.readouterr().err
    assert "no tokenizer" in said and ("announces 1 MTP modules" in said) == (version != "v2")
    assert_agree(folder, checkpoint, torch.float32, 1e-4, 1e-4 if interleave else None)
    if not interleave:  # the export is interleaved, and the same function still
        again = export(checkpoint, tmp_path / "again")
        assert json.loads((again / "config.json").read_text())["rope_interleave"] is True
        assert_agree(again, checkpoint, torch.float32, 1e-4, 1e-4)


def test_greedy_text_equals_transformers_generate(tmp_path, capsys):
    texts = ["def value return for in while\n" * 20, "class import self list = + ( ) : 0 1 2\n" * 20]
    tokenizer = Tokenizer.train(texts, 290)
    config = tiny_config(**ROPE, vocab_size=tokenizer.vocab_size, rope_scaling=YARN)
    tokenizer.save(tmp_path / "tokenizer.json")
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    folder = export(write_checkpoint(tmp_path / "run", config, files=files), tmp_path / "hf")
    import_(folder, tmp_path / "back")
    hf, theirs = hugging_face(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for prompt in ("def value", "class <｜User｜>é"):
        inputs = theirs(prompt, return_tensors="pt")
        assert inputs.input_ids[0].tolist() == tokenizer.encode_prompt(prompt)
        out = hf.generate(**inputs, do_sample=False, max_new_tokens=80)[0, inputs.input_ids.shape[1] :]
        capsys.readouterr()
        keys = ["temperature=0", "precision=fp32", "max_tokens=80"]
        assert main(["generate", f"checkpoint={tmp_path / 'back'}", f"prompt={prompt}", *keys]) == 0
        text = capsys.readouterr().out.removesuffix("\n")
        ids = out.tolist()
        assert len(set(ids)) > 3, "a text of one repeated token would prove little"
        assert text == tokenizer.decode(ids)
