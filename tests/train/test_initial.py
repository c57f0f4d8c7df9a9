"""checkpoint.initial: a run that starts from another checkpoint's weights. Right values: that checkpoint's tensors."""

import json

import pytest
import torch
from helpers import make_config, run, train_model, write_text
from hf_folders import export, import_, tensors

from dstrain.checkpoint.store import CheckpointStore
from dstrain.cli import main
from dstrain.model.init import initial_value

KEYS = [
    "data.text=text.txt", "data.cache=cache", "data.sequence_length=16", "batch.sequences=4", "batch.micro_sequences=4",
    "run.threads=1", "eval.every=0", "eval.at_end=false", "telemetry.peak_tflops=1", "precision=fp32",
    "schedule.learning_rate=[{until: 1e6, value: 0}]", "schedule.bias_speed=[{until: 1e6, value: 0}]",
]  # nothing moves: what the run saves is what it started from


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A BF16 run with FP32 masters; its export and the import of that, called `imported`."""
    folder = tmp_path_factory.mktemp("trained")
    assert run(make_config(folder, "run.steps=3", "precision=bf16")) == 0
    hf = export(folder / "runs/run", folder / "hf")
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    import_(hf, folder / "imported")
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    return tmp_path


def train(*keys) -> int:
    return main(["train", *KEYS, *map(str, keys)])


def saved(here, name="new") -> dict[str, torch.Tensor]:
    return tensors(CheckpointStore(here / "runs" / name / "checkpoints", 2).newest())


def weights(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in stored.items() if name.startswith(("model.", "lm_head."))}


def test_a_run_starts_from_an_imports_weights_architecture_and_tokenizer(here, trained, capsys):
    assert train(f"checkpoint.initial={trained}/imported", "run.name=new", "run.steps=1") == 0
    said = capsys.readouterr().out
    assert "starting from the weights of checkpoint.initial" in said and "model hf" in said
    initial, now = weights(tensors(trained / "imported")), weights(saved(here))
    assert initial.keys() == now.keys() and all(torch.equal(initial[name], now[name]) for name in initial)
    newest = CheckpointStore(here / "runs/new/checkpoints", 2).newest()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert CheckpointStore.file(newest, name) == CheckpointStore.file(trained / "imported", name)


def test_the_masters_of_a_runs_checkpoint_are_what_counts(here, trained):
    """The FP32 masters of the BF16 run, not their rounding; and in BF16 again the masters keep all their bits."""
    before = tensors(CheckpointStore(trained / "runs/run/checkpoints", 2).newest())
    masters = {n.removeprefix("optimizer.master."): t for n, t in before.items() if n.startswith("optimizer.master.")}
    assert any(not torch.equal(masters[n], before[n].float().flatten()) for n in masters)
    assert train(f"checkpoint.initial={trained}/runs/run", "run.name=new", "run.steps=1") == 0
    now = saved(here)
    assert all(torch.equal(now[name].flatten(), master) for name, master in masters.items())
    assert train(f"checkpoint.initial={trained}/imported", "run.name=narrow", "run.steps=1", "precision=bf16") == 0
    now = saved(here, "narrow")
    assert masters and all(torch.equal(now["optimizer.master." + name], master) for name, master in masters.items())


def test_the_run_continues_from_its_own_checkpoint_and_needs_the_initial_one_no_more(here, trained, capsys):
    import shutil

    shutil.copytree(trained / "imported", here / "initial")
    assert train("checkpoint.initial=initial", "run.name=new", "run.steps=1") == 0
    shutil.rmtree(here / "initial")
    capsys.readouterr()
    assert main(["train", "run.name=new", "run.steps=3"]) == 0
    said = capsys.readouterr().out
    assert "IGNORED checkpoint.initial=initial" in said and "continuing from" in said
    lines = (here / "runs/new/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_dropped_mtp_modules_are_named(here, trained, capsys):
    """FAULTS B18: depth 0 from a checkpoint with MTP."""
    keys = f"checkpoint.initial={trained}/imported", "run.name=new", "run.steps=1", "model.num_nextn_predict_layers=0"
    assert train(*keys) == 0
    assert "dropped: the 2 MTP modules of the checkpoint, model.layers.3, model.layers.4" in capsys.readouterr().out
    initial, now = weights(tensors(trained / "imported")), weights(saved(here))
    assert now.keys() == {name for name in initial if not name.startswith(("model.layers.3.", "model.layers.4."))}
    assert all(torch.equal(initial[name], now[name]) for name in now)


def test_mtp_modules_that_the_checkpoint_has_not_are_named_and_initialised(here, trained, capsys):
    keys = f"checkpoint.initial={trained}/imported", "run.name=new", "run.steps=1", "model.num_nextn_predict_layers=3"
    assert train(*keys) == 0
    assert "starting from initial values: 1 MTP modules, model.layers.5" in capsys.readouterr().out
    initial, now = weights(tensors(trained / "imported")), weights(saved(here))
    assert all(torch.equal(initial[name], now[name]) for name in initial)
    new = now.keys() - initial.keys()
    assert new and all(name.startswith("model.layers.5.") for name in new)
    config = train_model(num_nextn_predict_layers=3, initializer_range=0.05)
    for name in new - {"model.layers.5.mlp.gate.e_score_correction_bias"}:
        assert torch.equal(now[name], initial_value(name, now[name].shape, config, 1234, torch.float32)), name


@pytest.mark.parametrize(
    "keys, said",
    [
        (["model.num_nextn_predict_layers=1"], "valid: 0 (they are dropped) or at least 2"),
        (["model=tiny"], "model=tiny: another architecture"),
        (["model.hidden_size=32"], "model.hidden_size: 24 -> 32"),
        (["checkpoint.initial=nowhere"], "checkpoint.initial=nowhere: no such folder"),
        (["checkpoint.initial=."], "no complete checkpoint"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_line_and_starts_nothing(here, trained, capsys, keys, said):
    assert train(f"checkpoint.initial={trained}/imported", "run.name=new", "run.steps=1", *keys) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and not (here / "runs").exists()


def test_a_new_run_must_be_named(here, trained, capsys):
    assert train(f"checkpoint.initial={trained}/imported") == 2
    assert "run.name=" in capsys.readouterr().err


def test_another_tokenizer_must_fit_the_models_ids(here, trained, capsys):
    from dstrain.data.tokenizer import Tokenizer

    text = (here / "text.txt").read_text()
    Tokenizer.train([text], 290).save(here / "small.json")
    big = Tokenizer.train([text + "".join(chr(0x4E00 + i) * 3 for i in range(400))], 500)
    big.save(here / "big.json")
    assert big.vocab_size > 320
    keys = f"checkpoint.initial={trained}/imported", "run.steps=1"
    assert train(*keys, "run.name=small", "data.tokenizer=small.json") == 0
    files = CheckpointStore.files(CheckpointStore(here / "runs/small/checkpoints", 2).newest())
    assert files["tokenizer.json"] == (here / "small.json").read_bytes() and "chat_template.jinja" not in files
    capsys.readouterr()
    assert train(*keys, "run.name=big", "data.tokenizer=big.json") == 2
    assert "model.vocab_size is 320" in capsys.readouterr().err
