"""A damaged or foreign folder is one line that names file and tensors, and leaves nothing under the target's name."""

import json

import pytest
import torch
from hf_folders import export, read_folder, write_checkpoint
from oracle import tiny_config
from safetensors.torch import load_file, save_file

from dstrain.cli import main

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run"), tiny_config())


@pytest.fixture
def folder(checkpoint, tmp_path):
    return export(checkpoint, tmp_path / "hf", shard_size="40KB")


def refusal(folder, tmp_path, capsys) -> str:
    capsys.readouterr()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["import", f"from={folder}", f"out={tmp_path / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dstrain: ") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "something was left behind"
    return err


def rewrite(folder, change) -> str:
    """Applies `change` to the tensors of the first shard, and keeps the index as it is. -> the shard's name."""
    file = sorted(folder.glob("*.safetensors"))[1]
    held = load_file(file)
    change(held)
    save_file(held, file)
    return file.name


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_missing_shard(folder, tmp_path, capsys):
    shard = sorted(folder.glob("*.safetensors"))[1]
    held = sorted(load_file(shard))
    shard.unlink()
    said = refusal(folder, tmp_path, capsys)
    assert str(shard) in said and "missing" in said and held[0] in said


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_shard(folder, tmp_path, capsys, kept):
    shard = sorted(folder.glob("*.safetensors"))[1]
    held = sorted(load_file(shard))
    shard.write_bytes(shard.read_bytes()[:kept])
    said = refusal(folder, tmp_path, capsys)
    assert str(shard) in said and "truncated" in said and held[0] in said


def test_a_shard_that_is_not_in_the_index(folder, tmp_path, capsys):
    save_file({"x": torch.ones(1)}, folder / "extra.safetensors")
    assert "extra.safetensors: the shard is not in" in refusal(folder, tmp_path, capsys)


def test_a_tensor_that_the_index_has_and_the_shard_has_not(folder, tmp_path, capsys):
    names = []
    shard = rewrite(folder, lambda held: names.append(held.popitem()[0]))
    said = refusal(folder, tmp_path, capsys)
    assert shard in said and names[0] in said


def test_a_tensor_that_is_nowhere(folder, tmp_path, capsys):
    names = []
    rewrite(folder, lambda held: names.append(held.popitem()[0]))
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map[names[0]]
    edit_json(folder / INDEX, weight_map=weight_map)
    said = refusal(folder, tmp_path, capsys)
    assert "missing" in said and names[0] in said


def test_a_tensor_of_another_shape(folder, tmp_path, capsys):
    names = []

    def change(held):
        names.append(next(iter(held)))
        held[names[0]] = torch.ones(3, 5)

    shard = rewrite(folder, change)
    said = refusal(folder, tmp_path, capsys)
    assert shard in said and names[0] in said and "[3, 5]" in said


def test_a_doubled_tensor(folder, tmp_path, capsys):
    shard = rewrite(folder, lambda held: held.update({"model.embed_tokens.weight": torch.ones(61, 24)}))
    said = refusal(folder, tmp_path, capsys)
    assert shard in said and "model.embed_tokens.weight is doubled" in said


def test_a_tensor_doubled_in_the_index(folder, tmp_path, capsys):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x.safetensors",'))
    said = refusal(folder, tmp_path, capsys)
    assert INDEX in said and "'lm_head.weight' is doubled" in said


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.8.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
)
def test_a_tensor_left_over(folder, tmp_path, capsys, name):
    shard = rewrite(folder, lambda held: held.update({name: torch.ones(2)}))
    assert f"{name} is not in {INDEX}" in refusal(folder, tmp_path, capsys)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit_json(folder / INDEX, weight_map=weight_map | {name: shard})
    said = refusal(folder, tmp_path, capsys)
    assert shard in said and "left over" in said and name in said


def test_mtp_layers_that_config_does_not_announce_are_left_over_and_a_part_of_them_is_missing(folder, tmp_path, capsys):
    """FAULTS B18: a dropped or half MTP module never passes."""
    for depth, word in ((0, "left over"), (1, "left over"), (3, "missing")):
        edit_json(folder / "config.json", num_nextn_predict_layers=depth)
        assert word in refusal(folder, tmp_path, capsys)


@pytest.mark.parametrize("copy", ["model.layers.4.embed_tokens.weight", "model.layers.3.shared_head.head.weight"])
def test_an_mtp_copy_that_differs_from_the_main_model(folder, tmp_path, capsys, copy):
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][copy]
    held = load_file(shard)
    held[copy][60, 23] += 1
    save_file(held, shard)
    said = refusal(folder, tmp_path, capsys)
    assert shard.name in said and f"{copy} differs" in said


def damaged_fp8(checkpoint, tmp_path, change):
    folder = export(checkpoint, tmp_path / "hf8", "fp8")
    held = read_folder(folder)
    change(held)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t, n: t.pop(n + "_scale_inv"), "without scales"),
        (lambda t, n: t.update({n + "_scale_inv": torch.ones(2, 1)}), "[2, 1]"),
        (lambda t, n: t.update({n: t[n].float()}), "left over"),
        (lambda t, n: t.update({n: t[n].to(torch.int32)}), "I32"),
        (lambda t, n: t.update({n: t[n].to(torch.float8_e5m2)}), "F8_E5M2"),
    ],
    ids=["no scale", "scale of another shape", "scale without FP8", "integers", "another FP8"],
)
def test_fp8_weights_and_scales_that_do_not_belong_together(checkpoint, tmp_path, capsys, change, said):
    """FAULTS B16."""
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    line = refusal(damaged_fp8(checkpoint, tmp_path, lambda held: change(held, name)), tmp_path, capsys)
    assert name in line and said in line and "model.safetensors" in line


def test_fp8_without_its_quantization_config(checkpoint, tmp_path, capsys):
    folder = export(checkpoint, tmp_path / "hf", "fp8")
    edit_json(folder / "config.json", quantization_config=None)
    assert "no quantization_config" in refusal(folder, tmp_path, capsys)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"rope_theta": None, "rope_parameters": None}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "new": 1}}, "new"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}, "weight_block_size"),
    ],
    ids=str,
)
def test_an_unknown_architecture_or_quantisation(folder, tmp_path, capsys, changes, said):
    edit_json(folder / "config.json", **changes)
    line = refusal(folder, tmp_path, capsys)
    assert "config.json" in line and said in line


@pytest.mark.parametrize("name, text", [("config.json", None), ("config.json", "{"), (INDEX, "[]"), (INDEX, "{}")])
def test_missing_or_broken_json(folder, tmp_path, capsys, name, text):
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    assert name in refusal(folder, tmp_path, capsys)


def test_a_folder_that_is_not_there_or_has_no_safetensors(tmp_path, capsys):
    assert "no such folder" in refusal(tmp_path / "nowhere", tmp_path, capsys)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refusal(tmp_path / "empty", tmp_path, capsys)
    (tmp_path / "empty/config.json").write_text("{}")
    assert "safetensors" in refusal(tmp_path / "empty", tmp_path, capsys)


def test_a_tokenizer_with_more_ids_than_the_model(folder, tmp_path, capsys):
    from dstrain.data.tokenizer import Tokenizer

    Tokenizer.train(["def f"], 270).save(folder / "tokenizer.json")
    assert "vocab_size=61" in refusal(folder, tmp_path, capsys)
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in refusal(folder, tmp_path, capsys)


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_target_that_is_not_empty_is_left_alone(command, folder, checkpoint, tmp_path, capsys):
    source = f"from={folder}" if command == "import" else f"checkpoint={checkpoint}"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("precious")
    for out in (tmp_path / "out", tmp_path / "out/mine"):
        capsys.readouterr()
        assert main([command, source, f"out={out}"]) == 2
        err = capsys.readouterr().err
        assert "not empty" in err.splitlines()[-1] and str(out) in err
    assert (tmp_path / "out/mine").read_text() == "precious"
    (tmp_path / "out/mine").unlink()
    assert main([command, source, f"out={tmp_path / 'out'}"]) == 0  # an empty one is fine


@pytest.mark.parametrize(
    "keys, said",
    [
        (["dtype=int4"], "dtype"),
        (["shard_size=big"], "shard_size"),
        (["shard_size=0"], "shard_size"),
        (["shard_size=1KB"], "model.embed_tokens.weight alone"),
        (["fp8_scales=mean"], "fp8_scales"),
        (["checkpoint=nowhere"], "no such folder"),
        (["out="], "out"),
    ],
    ids=str,
)
def test_impossible_exports(checkpoint, tmp_path, capsys, keys, said):
    capsys.readouterr()
    code = main(["export", f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}", *keys])
    err = capsys.readouterr().err
    assert code == 2 and said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"scoring_func": "softmax"}, "topk_method"),
        ({"topk_method": "greedy", "n_group": 1, "topk_group": 1}, "topk_method"),
        ({"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"}, "norm_topk_prob"),
    ],
    ids=["softmax with bias", "sigmoid greedy", "softmax normalised"],
)
def test_routers_that_no_hugging_face_model_has(tmp_path, capsys, changes, said):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_config(**changes))
    capsys.readouterr()
    assert main(["export", f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}"]) == 2
    assert f"model.{said}" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite_has_no_fp8(tmp_path, capsys):
    config = tiny_config()
    extra = {"model.layers.0.mlp.up_proj.weight": torch.full((32, 24), torch.nan)}
    checkpoint = write_checkpoint(tmp_path / "run", config, extra=extra)
    capsys.readouterr()
    assert main(["export", f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}", "dtype=fp8"]) == 2
    assert "model.layers.0.mlp.up_proj.weight" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
