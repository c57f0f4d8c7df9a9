"""`dstrain generate` on a run trained in the test."""

import io
import os
import re
import subprocess
import sys

import pytest
from helpers import make_config, run

from dstrain.cli import main
from dstrain.config.run_files import load_train_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert run(make_config(folder, "run.steps=30")) == 0
    return folder / "runs/run"


def generate(capsys, trained, *overrides):
    code = main(["generate", f"checkpoint={trained}", "precision=fp32", *overrides])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_only_the_text_is_on_stdout_and_a_seed_repeats_it(capsys, trained):
    first = generate(capsys, trained, "prompt=def return", "max_tokens=12", "seed=3")
    assert first[0] == 0 and first[1].endswith("\n")
    assert generate(capsys, trained, "prompt=def return", "max_tokens=12", "seed=3") == first
    texts = {generate(capsys, trained, "prompt=def return", "max_tokens=12", f"seed={seed}")[1] for seed in range(4)}
    assert len(texts) > 1
    echoed = generate(capsys, trained, "prompt=def return", "max_tokens=12", "seed=3", "echo=true")
    assert echoed[1] == "def return" + first[1]


def test_greedy_does_not_depend_on_the_seed_and_the_prompt_can_be_piped(capsys, trained, monkeypatch):
    first = generate(capsys, trained, "prompt=value = 0", "temperature=0", "max_tokens=8", "seed=1")
    assert generate(capsys, trained, "prompt=value = 0", "temperature=0", "max_tokens=8", "seed=2") == first
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"value = 0\n")))
    assert generate(capsys, trained, "temperature=0", "max_tokens=8") == first


def test_one_checkpoint_folder_works_as_well_as_a_run_folder(capsys, trained):
    first = generate(capsys, trained, "prompt=a", "max_tokens=5")
    assert generate(capsys, trained / "checkpoints/step-00000030", "prompt=a", "max_tokens=5") == first


def test_a_prompt_at_and_over_the_context_is_refused_and_one_below_it_works(capsys, trained):
    """FAULTS D14. The context is max_position_embeddings, begin mark included."""
    context = load_train_config(trained / "config.yaml").model.max_position_embeddings
    prompt = "~" * (context - 2)  # a character that the training text has not is one token each
    assert generate(capsys, trained, f"prompt={prompt}", "max_tokens=5")[0] == 0
    code, out, err = generate(capsys, trained, f"prompt={prompt}~", "max_tokens=5")
    assert code == 2 and out == "" and f"at most {context - 1}" in err and err.count("\n") == 1


@pytest.mark.parametrize("override", ["max_tokens=0", "max_tokens=-1", "temperature=-1", "top_p=1.5", "top_k=0", "max_tokens=many"])
def test_impossible_settings_are_refused_in_one_line(capsys, trained, override):
    code, out, err = generate(capsys, trained, "prompt=a", override)
    assert code == 2 and out == "" and override.split("=")[0] in err and err.count("\n") == 1


def test_a_huge_max_tokens_stops_at_the_context_and_an_empty_prompt_starts_a_document(capsys, trained):
    code, out, err = generate(capsys, trained, "prompt=", "max_tokens=1000000")
    assert code == 0 and "stopping after" in err


@pytest.mark.parametrize("where, said", [("nowhere", "no such folder"), (".", "checkpoint")])
def test_a_wrong_checkpoint_is_refused_in_one_line(capsys, tmp_path, where, said):
    code = main(["generate", f"checkpoint={tmp_path / where}", "prompt=a"])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and said in captured.err and captured.err.count("\n") == 1


def test_a_corrupt_newest_checkpoint_falls_back_loudly_and_is_left_where_it_is(capsys, tmp_path):
    assert run(make_config(tmp_path, "run.steps=4", "checkpoint.every=2")) == 0
    folder = tmp_path / "runs/run"
    file = next((folder / "checkpoints/step-00000004/tensors").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    code, _, err = generate(capsys, folder, "prompt=a", "max_tokens=2")
    assert code == 0 and "CORRUPT" in err and "step-00000004" in err
    assert file.exists()


def test_text_leaves_as_utf_8_in_a_locale_that_knows_only_ascii(trained):
    command = [sys.executable, "-m", "dstrain", "generate", f"checkpoint={trained}", "max_tokens=1", "echo=true"]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, input="é😀".encode(), capture_output=True, env=plain)
    assert done.returncode == 0 and done.stdout.startswith("é😀".encode()), done.stderr


def test_closed_standard_streams_are_one_line(trained):
    command = f"{sys.executable} -m dstrain generate checkpoint={trained} max_tokens=1"
    for closed, said in ((">&- prompt=a", "standard output is closed"), ("<&-", "no prompt")):
        done = subprocess.run(["bash", "-c", f"{command} {closed}"], capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_drafts_change_no_greedy_text_and_their_acceptance_is_told(capsys, trained):
    keys = ("prompt=def return value", "max_tokens=20", "temperature=0")
    plain = generate(capsys, trained, *keys)
    for drafts in (1, 2):
        code, out, err = generate(capsys, trained, *keys, f"drafts={drafts}")
        assert code == 0 and out == plain[1]
        said = re.fullmatch(r"dstrain: drafts: (\d+) of (\d+) accepted \(by depth [\d%, ]+\), ([\d.]+) tokens a step .*\n", err)
        accepted, offered = int(said[1]), int(said[2])
        assert offered % drafts == 0 and accepted <= offered
        assert float(said[3]) == pytest.approx(1 + accepted * drafts / offered, abs=0.005)


@pytest.mark.parametrize("drafts, said", [("3", "valid: 0 to 2"), ("-1", "drafts=-1"), ("many", "drafts")])
def test_more_drafts_than_the_checkpoint_has_modules_are_refused_in_one_line(capsys, trained, drafts, said):
    code, out, err = generate(capsys, trained, "prompt=a", f"drafts={drafts}")
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_compiled_decoding_in_fp8_is_refused_in_one_line(capsys, trained):
    code = main(["generate", f"checkpoint={trained}", "prompt=a", "precision=fp8", "compile=true"])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and "compile=true" in captured.err and captured.err.count("\n") == 1
