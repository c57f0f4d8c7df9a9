"""`dstrain evaluate` against the trainer's own evaluation and against the oracle's full forward pass in float64."""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_config, run, train_model, write_text
from oracle import oracle

from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.tensors import load_tensors, tensor_names
from dstrain.cli import main
from dstrain.data.indexed import IndexedWriter
from dstrain.data.tokenizer import Tokenizer

KEYS = ("loss", "loss_mtp", "accuracy", "accuracy_mtp", "bits_per_byte", "heldout_tokens", "heldout_bytes", "whole")
MODEL = train_model(num_hidden_layers=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A BF16 run with an average, evaluated after 3 steps on 5 sequences and after 6 on all. -> its folder."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_config(
        folder, "precision=bf16", "ema.decay=0.5", "schedule.learning_rate=[{until: 1e6, value: 0.02}]",
        "eval.every=3", "eval.sequences=5", "eval.at_end=true", "checkpoint.every=3", "batch.micro_sequences=2",
        model=MODEL,
    )
    assert run(config) == 0
    return folder / "runs/run"


def write(prefix, documents):
    with IndexedWriter(prefix) as writer:
        for ids in documents:
            writer.add_document(ids)


def evaluate(capsys, where, *overrides):
    """The JSON object of `dstrain evaluate`, the only line on standard output."""
    capsys.readouterr()
    assert main(["evaluate", f"checkpoint={where}", "output=json", *overrides]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys, where, *overrides):
    """The line with which bad input ends."""
    capsys.readouterr()
    assert main(["evaluate", f"checkpoint={where}", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_it_equals_the_trainers_own_evaluation_to_the_last_digit(capsys, trained):
    records = {(r["step"], r["whole"]): r for r in map(json.loads, (trained / "eval.jsonl").read_text().splitlines())}
    assert records.keys() == {(3, False), (6, False), (6, True)}
    for overrides, right in (
        ([trained], records[6, True]), ([trained, "sequences=5"], records[6, False]),
        ([trained / "checkpoints/step-00000003", "sequences=5"], records[3, False]),
    ):
        found = evaluate(capsys, *overrides)
        assert {key: found[key] for key in KEYS} == {key: right[key] for key in KEYS}
        assert (found["step"], found["tokens"], found["precision"]) == (right["step"], right["tokens"], "bf16")
    assert records[6, True]["loss"] != records[6, False]["loss"] and 0 < records[6, True]["accuracy"] < 1


@pytest.mark.parametrize("weights", ["final", "ema"])
def test_every_number_is_that_of_the_full_forward_pass_in_float64(capsys, trained, tmp_path, weights):
    """A text of two documents, whose last window is padded; the oracle sees the same windows."""
    path = CheckpointStore(trained / "checkpoints", 2).newest()
    tokenizer = Tokenizer.load(path / "files/tokenizer.json")
    documents = [tokenizer.encode_document(write_text(tmp_path / "text", lines, seed=5).read_text()) for lines in (3, 7)]
    write(tmp_path / "tokens", documents)
    found = evaluate(capsys, trained, f"data={tmp_path / 'tokens'}", f"weights={weights}", "precision=fp64")
    stored = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in tensor_names(path).items()}
    load_tensors(path, stored)
    own = {name: tensor.double() for name, tensor in stored.items() if name.startswith(("model.", "lm_head."))}
    if weights == "ema":
        own = {name: stored[f"ema.{name}"].double().view(tensor.shape) for name, tensor in own.items()}
    ids, length = torch.tensor(sum(documents, [])), 16
    windows = -(-(len(ids) - 1) // length)
    tokens, there = torch.zeros(windows, length + 3, dtype=torch.int64), torch.full((windows, length + 3), -1)
    for window in range(windows):
        part = ids[window * length :][: length + 3]
        tokens[window, : len(part)], there[window, : len(part)] = part, 0
    right = oracle(MODEL, own, tokens, there, balance_alpha=0.0, mtp_weight=0.0)

    losses, accuracy, texts = [], [], 0
    lengths = tokenizer.token_bytes()
    for depth, logits in enumerate(right.logits):
        total = hits = count = 0
        for position in range(len(ids) - 1 - depth):  # each predicts the token 1 + depth behind it, once
            row, column = divmod(position, length)
            target = int(ids[position + 1 + depth])
            total -= float(logits[row, column].log_softmax(-1)[target])
            hits += int(logits[row, column].argmax()) == target
            count += 1
            texts += int(lengths[target]) if depth == 0 else 0
        losses.append(total / count)
        accuracy.append(hits / count)
        if depth == 0:
            assert (found["heldout_tokens"], found["heldout_bytes"]) == (count, texts)
            assert found["bits_per_byte"] == pytest.approx(total / np.log(2) / texts, rel=1e-9)
    assert [found["loss"], *found["loss_mtp"]] == pytest.approx(losses, rel=1e-9)
    assert [found["accuracy"], *found["accuracy_mtp"]] == accuracy
    assert windows > 4 and there[-1, length - 1] == -1 and len(set(accuracy)) == 3 and min(accuracy) > 0
    assert found["moe_load"] == [load.tolist() for load in right.loads] and found["moe_layers"] == [1, 2, 3]
    violation = max(float(load.max() / load.double().mean() - 1) for load in right.loads)
    assert found["moe_max_violation"] == pytest.approx(violation)
    assert (found["weights"], found["sequences"], found["whole"]) == (weights, windows, True)


def test_a_text_file_is_one_document(capsys, trained, tmp_path):
    text = write_text(tmp_path / "other.txt", lines=40, seed=3)
    found = evaluate(capsys, trained, f"data={text}")
    tokenizer = Tokenizer.load(next((trained / "checkpoints").iterdir()) / "files/tokenizer.json")
    ids = tokenizer.encode_document(text.read_text())
    assert found["heldout_bytes"] == len(text.read_bytes()) and found["heldout_tokens"] == len(ids) - 1
    write(tmp_path / "ready", [ids])
    ready = evaluate(capsys, trained, f"data={tmp_path / 'ready'}")
    assert {key: found[key] for key in KEYS} == {key: ready[key] for key in KEYS}
    longer = evaluate(capsys, trained, f"data={text}", "sequence_length=32", "sequences=100000")
    assert longer["sequence_length"] == 32 and longer["sequences"] == -(-(len(ids) - 1) // 32) and longer["whole"]
    assert longer["heldout_bytes"] == found["heldout_bytes"] and longer["loss"] != found["loss"]


def test_the_table_has_a_line_for_every_depth_and_layer(capsys, trained):
    found = evaluate(capsys, trained)
    assert main(["evaluate", f"checkpoint={trained}"]) == 0
    captured = capsys.readouterr()
    lines = {words[0]: words[1:] for line in captured.out.splitlines() if (words := line.split())}
    assert captured.err == ""
    assert lines["main"] == [f"{found['loss']:.4f}", f"{found['accuracy']:.2%}"]
    assert lines["1"][0] == f"{max(found['moe_load'][0]) / (sum(found['moe_load'][0]) / 8) - 1:.2f}"
    rows = [line.split() for line in captured.out.splitlines() if line.startswith("mtp")]
    assert [row[:2] for row in rows] == [["mtp", "1"], ["mtp", "2"]] * 2
    assert rows[1][2:] == [f"{found['loss_mtp'][1]:.4f}", f"{found['accuracy_mtp'][1]:.2%}"]
    busiest = found["moe_load"][2].index(max(found["moe_load"][2]))
    assert rows[3][3] == str(busiest) and f"{found['bits_per_byte']:.4f} of" in captured.out


def test_a_model_without_mtp_and_without_experts(capsys, tmp_path):
    dense = train_model(num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0)
    assert run(make_config(tmp_path, "run.steps=1", model=dense)) == 0
    found = evaluate(capsys, tmp_path / "runs/run", "sequences=3")
    assert found["loss_mtp"] == found["accuracy_mtp"] == found["moe_load"] == [] and found["moe_max_violation"] == 0
    assert main(["evaluate", f"checkpoint={tmp_path / 'runs/run'}", "sequences=3"]) == 0
    assert "mtp 1" not in (out := capsys.readouterr().out) and "expert load" not in out


def test_where_there_is_no_terminal_lines_tell_how_far_it_is(trained, capsys, monkeypatch):
    monkeypatch.setattr("dstrain.train.evaluate.REPORT_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    evaluate(capsys, trained, "sequences=5")
    lines = sys.stderr.getvalue().splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in lines] == [f"{n} of 5 sequences" for n in (2, 4, 5)]


def test_bad_data_is_one_line(capsys, trained, tmp_path):
    path = CheckpointStore(trained / "checkpoints", 2).newest()
    for name, documents in {"large": [[1, 2], [3, 4000]], "none": [], "one": [[5]], "ready": [[1, 2, 3]]}.items():
        write(tmp_path / name, documents)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "ready.json").write_text(json.dumps({"job": {"tokenizer": "0" * 64}}))
    for data, said in {
        "large": "token id 4000 at token 3", "none": "0 tokens found, evaluation needs at least 2",
        "one": "1 tokens found, evaluation needs at least 2", "empty.txt": "empty; UTF-8 text or the prefix",
        "latin.txt": "not UTF-8: byte 0xe9 at offset 3", "ready.bin": "token files are named by what comes before .bin",
        "nowhere": "no such file; token files are a pair", "ready": f"another tokenizer than that of checkpoint {path}",
        "": "data is empty",
    }.items():
        assert said in refused(capsys, trained, f"data={tmp_path / data if data else ''}"), data
    (tmp_path / "ready.json").write_text("of another program")
    assert evaluate(capsys, trained, f"data={tmp_path / 'ready'}")["heldout_tokens"] == 2


def test_settings_that_cannot_be_are_one_line(capsys, trained, tmp_path):
    for override, said in {
        "sequences=0": "sequences=0", "weights=best": "must be one of final, ema", "precision=fp4": "precision=fp4",
        "output=yaml": "must be one of table, json", "sequence_length=100000": "sequence_length=100000: ",
        "device=tpu": "device=tpu", "checkpoint=nowhere": "checkpoint=nowhere: no such folder",
    }.items():
        assert said in refused(capsys, trained, override), override


def test_a_run_whose_data_or_average_is_gone_says_so(capsys, tmp_path, monkeypatch):
    config = make_config(tmp_path, "run.steps=1", model=MODEL)
    assert run(config) == 0
    folder = tmp_path / "runs/run"
    assert "holds no average" in refused(capsys, folder, "weights=ema")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "meta", lambda path: {"format": 1, "imported": True})
        assert "was imported and has no held-out set" in refused(capsys, folder)
        assert main(["evaluate", f"checkpoint={folder}", f"data={config.data.text}", "sequences=2"]) == 0
        assert "imported; final weights in fp32" in capsys.readouterr().out
    before = evaluate(capsys, folder)
    write_text(Path(config.data.text), seed=9)  # what was made of the text before is still there
    assert evaluate(capsys, folder)["loss"] == before["loss"]
    shutil.rmtree(config.data.cache)
    assert main(["evaluate", f"checkpoint={folder}"]) == 2
    assert "is not what it was trained on any more" in capsys.readouterr().err.splitlines()[-1]
