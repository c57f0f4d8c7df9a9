"""What lies in an exported folder, and what comes back from it: names, types, shards, tokenizer files.

Right values: the layout of the released weights (REFERENCE §5) and the values in the checkpoint itself.
"""

import json

import pytest
import torch
from hf_folders import export, import_, read_folder, tensors, write_checkpoint
from oracle import tiny_config
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from dstrain.checkpoint.hf_names import released_tensors
from dstrain.checkpoint.store import CheckpointStore
from dstrain.data.tokenizer import BOS, Tokenizer

# 128 rows and columns in every matrix that may be FP8, except kv_a_proj_with_mqa with 136 rows.
EVEN = dict(
    vocab_size=61, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_attention_heads=16,
    q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4,
    num_experts_per_tok=2, n_group=2, topk_group=1, num_nextn_predict_layers=1, mtp_depth_weights=None,
)


def test_names_of_v3_are_the_released_ones():
    """By hand: layer 3 is the MTP module of a model with three layers, the first of them dense."""
    config = tiny_config(num_nextn_predict_layers=1, mtp_depth_weights=None)
    names = {tensor.name for tensor in released_tensors(config)}
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.7.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.2.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.enorm.weight",
        "model.layers.3.hnorm.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.3.shared_head.norm.weight",
        "model.layers.3.shared_head.head.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= names
    assert not any(name.startswith("model.layers.4") for name in names)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_depth_goes_out_with_copies_of_embedding_and_head_and_comes_back(depth, tmp_path):
    """FAULTS B18; and B03: from folder to checkpoint to folder, every byte is the same."""
    config = tiny_config(num_nextn_predict_layers=depth, mtp_depth_weights=None)
    checkpoint = write_checkpoint(tmp_path / "run", config)
    folder = export(checkpoint, tmp_path / "hf")
    written = read_folder(folder)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == depth
    layers = {int(name.split(".")[2]) for name in written if name.startswith("model.layers.")}
    assert layers == set(range(3 + depth))
    for k in range(depth):
        assert torch.equal(written[f"model.layers.{3 + k}.embed_tokens.weight"], written["model.embed_tokens.weight"])
        assert torch.equal(written[f"model.layers.{3 + k}.shared_head.head.weight"], written["lm_head.weight"])
    before, after = tensors(checkpoint), tensors(import_(folder, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = export(tmp_path / "back", tmp_path / "again")
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {f.name: f.read_bytes() for f in again.iterdir()}


def test_without_query_lora_there_is_q_proj_only(tmp_path):
    """FAULTS B21."""
    checkpoint = write_checkpoint(tmp_path / "run", tiny_config(q_lora_rank=None))
    names = set(read_folder(export(checkpoint, tmp_path / "hf")))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not any("q_a_" in name or "q_b_" in name for name in names)
    assert set(tensors(import_(tmp_path / "hf", tmp_path / "back"))) == set(tensors(checkpoint))


@pytest.mark.parametrize("dtype, plain", [("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp8", torch.bfloat16)])
def test_types_of_each_kind_of_tensor(dtype, plain, tmp_path):
    """FAULTS A05 and B23: the routing bias is always FP32. Never FP8: gate, norms, embedding, head, eh_proj."""
    folder = export(write_checkpoint(tmp_path / "run", tiny_config(**EVEN)), tmp_path / "hf", dtype)
    written = read_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    never = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "gate.weight", "eh_proj.weight", "head.weight")
    for name, tensor in written.items():
        if name.endswith(("e_score_correction_bias", "_scale_inv")):
            assert tensor.dtype == torch.float32
        elif dtype != "fp8" or name.endswith(never):
            assert tensor.dtype == plain, name
        else:
            assert tensor.dtype == torch.float8_e4m3fn, name
            assert written[name + "_scale_inv"].shape == tuple(-(-size // 128) for size in tensor.shape)
    assert sum(name.endswith("e_score_correction_bias") for name in written) == 3
    quantized = sum(name.endswith("_scale_inv") for name in written)
    # 4 layers: 5 matrices of attention; 3 of the dense FFN; 3 for each of 4 + 1 experts, the shared one being joined
    assert quantized == (4 * 5 + 3 + 3 * 3 * 5 if dtype == "fp8" else 0)
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert config.get("quantization_config") == (wanted if dtype == "fp8" else None)
    assert config["torch_dtype"] == str(plain).removeprefix("torch.")


@pytest.mark.parametrize("scales", ["power_of_two", "fp32"])
def test_fp8_comes_back_as_transformers_dequantises_it(scales, tmp_path):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_config(**EVEN))
    folder = export(checkpoint, tmp_path / "hf", "fp8", fp8_scales=scales)
    written, back = read_folder(folder), tensors(import_(folder, tmp_path / "back"))
    original, compared = tensors(checkpoint), 0
    for tensor in released_tensors(tiny_config(**EVEN)):
        mine = back[tensor.ours] if tensor.expert is None else back[tensor.ours][tensor.expert]
        stored = written[tensor.name]
        if tensor.name + "_scale_inv" not in written:
            assert torch.equal(mine, stored)
            continue
        scale = written[tensor.name + "_scale_inv"]
        assert mine.dtype == torch.bfloat16
        if tensor.shape[0] % 128 == 0:
            assert torch.equal(mine, Fp8Dequantize(None)._dequantize_one(stored, scale, torch.bfloat16))
            compared += 1
        else:  # 136 rows: the rule of the released description, padded with zeros
            padded = torch.zeros(256, 128)
            padded[:136] = stored.float()
            assert torch.equal(mine, (padded * scale.repeat_interleave(128, 0))[:136].to(torch.bfloat16))
        was = original[tensor.ours] if tensor.expert is None else original[tensor.ours][tensor.expert]
        assert (mine - was).abs().max() < 0.08 * was.abs().max()
    assert compared > 20


def test_masters_are_exported_where_a_run_has_them(tmp_path):
    """A BF16 run keeps FP32 masters, flat; its BF16 weights are their rounding."""
    config = tiny_config()
    values = tensors(write_checkpoint(tmp_path / "wide", config))
    masters = {f"optimizer.master.{name}": v.flatten() for name, v in values.items() if not name.endswith("_bias")}
    checkpoint = write_checkpoint(tmp_path / "run", config, torch.bfloat16, extra=masters)
    back = tensors(import_(export(checkpoint, tmp_path / "fp32"), tmp_path / "back32"))
    assert all(torch.equal(back[name], values[name]) for name in values)
    back = tensors(import_(export(checkpoint, tmp_path / "bf16", "bf16"), tmp_path / "back16"))
    assert all(torch.equal(back[name], values[name].to(back[name].dtype)) for name in values)


@pytest.mark.parametrize("asked, limit", [("40KB", 40_000), ("40KiB", 40_960), ("30000", 30_000), ("1GB", 10**9)])
def test_no_file_is_larger_than_shard_size_and_the_index_is_complete(asked, limit, tmp_path):
    folder = export(write_checkpoint(tmp_path / "run", tiny_config()), tmp_path / "hf", shard_size=asked)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert max(file.stat().st_size for file in files) <= limit and (len(files) > 5) == (limit < 10**6)
    held = {}
    for file in files:
        with safe_open(file, "pt") as stored:
            held |= dict.fromkeys(stored.keys(), file.name)
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_folder(folder).values())


def test_a_weight_and_its_scales_may_lie_in_different_shards(tmp_path):
    """FAULTS B16."""
    folder = export(write_checkpoint(tmp_path / "run", tiny_config(**EVEN)), tmp_path / "hf", "fp8")
    together = tensors(import_(folder, tmp_path / "together"))
    written = read_folder(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    scales = {name: tensor for name, tensor in written.items() if name.endswith("_scale_inv")}
    weights = {name: tensor for name, tensor in written.items() if name not in scales}
    parts = {"scales.safetensors": scales, "weights.safetensors": weights}
    for name, part in parts.items():
        save_file(part, folder / name)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    apart = tensors(import_(folder, tmp_path / "apart"))
    assert all(torch.equal(together[name], apart[name]) for name in together)


def test_copies_may_be_left_out_and_inverse_frequencies_may_be_there(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "run", tiny_config())
    folder = export(checkpoint, tmp_path / "hf")
    copies = ("layers.3.embed_tokens.weight", "shared_head.head.weight")
    written = {name: tensor for name, tensor in read_folder(folder).items() if not name.endswith(copies)}
    written["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(written, folder / "model.safetensors")
    before, after = tensors(checkpoint), tensors(import_(folder, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_our_tokenizer_goes_out_so_that_transformers_encodes_like_generate(tmp_path):
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n" * 20], 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    folder = export(write_checkpoint(tmp_path / "run", config, files=files), tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("def f", "", "é <｜User｜> 1", " x"):
        assert theirs(text).input_ids == tokenizer.encode_prompt(text)
    assert (theirs.bos_token, theirs.bos_token_id, theirs.eos_token_id) == (BOS, tokenizer.bos_id, tokenizer.eos_id)
    assert theirs.decode(theirs("def f(x)").input_ids, skip_special_tokens=True) == "def f(x)"
    config = json.loads((folder / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_id, tokenizer.eos_id)


def test_a_folders_own_tokenizer_files_come_back_byte_for_byte(tmp_path):
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n" * 20], 280)
    tokenizer.save(tmp_path / "tokenizer.json")
    files = {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    folder = export(write_checkpoint(tmp_path / "run", tiny_config(vocab_size=300), files=files), tmp_path / "hf")
    own = {
        "tokenizer.json": (folder / "tokenizer.json").read_bytes() + b"\n",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}", "bos_token": BOS}).encode(),
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b'{"temperature": 0.3}',
    }
    for name, data in own.items():
        (folder / name).write_bytes(data)
    checkpoint = import_(folder, tmp_path / "back")
    again = export(checkpoint, tmp_path / "again")
    for name, data in own.items():
        assert CheckpointStore.file(checkpoint, name) == data == (again / name).read_bytes()
