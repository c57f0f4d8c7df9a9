"""A run that is interrupted and started again equals the unbroken one, bit for bit."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers import make_config, metrics, run, status

from dstrain.checkpoint.tensors import load_tensors, tensor_names
from dstrain.telemetry.jsonl import JsonLines
from dstrain.train.run_folder import RunFolder

TIMES = ("step_time", "tokens_per_second", "mfu")


def final_tensors(config, step):
    path = Path(config.run.dir) / config.run.name / "checkpoints" / f"step-{step:08}"
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_names(path).items()}
    load_tensors(path, into)
    return into


def same_runs(a, b, step):
    left, right = final_tensors(a, step), final_tensors(b, step)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name].view(-1).view(torch.uint8), right[name].view(-1).view(torch.uint8)) for name in left)
    rows = [[{k: v for k, v in row.items() if k not in TIMES} for row in metrics(c)] for c in (a, b)]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == list(range(1, step + 1))


@pytest.mark.parametrize("precision, decay", [("fp32", "0.9"), ("bf16", "0.9"), ("fp8", "null"), ("fp64", "null")])
def test_ten_steps_restart_ten_steps_equal_twenty(tmp_path, precision, decay):
    common = [f"precision={precision}", "optim.moments=bf16", f"ema.decay={decay}", "ema.every=3"]
    whole = make_config(tmp_path, *common, "run.name=whole", "run.steps=20")
    assert run(whole) == 0
    assert run(make_config(tmp_path, *common, "run.name=parts", "run.steps=10")) == 0
    parts = make_config(tmp_path, *common, "run.name=parts", "run.steps=20")
    assert run(parts) == 0
    same_runs(whole, parts, 20)
    assert status(parts)["status"] == "finished"


def command(config, *overrides):
    """The same configuration as a command of its own process, through a config that the test writes."""
    code = (
        "import sys, yaml, dataclasses\n"
        "from dstrain.config.build import build\n"
        "from dstrain.config.schema import TrainConfig\n"
        "from dstrain.train.main import train\n"
        "plain = yaml.safe_load(open(sys.argv[1]))\n"
        "sys.exit(train(build(TrainConfig, plain), plain, []))\n"
    )
    import dataclasses

    path = Path(config.run.dir).parent / f"{config.run.name}.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(config)))
    return [sys.executable, "-c", code, str(path)]


def start(config):
    return subprocess.Popen(
        command(config), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def wait_for(condition, what, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended before {what}: {process.stdout.read()}"
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)


def test_kill_in_the_middle_of_a_save_loses_nothing(tmp_path):
    """kill -9 while a temporary checkpoint folder is being written; then the same command again."""
    whole = make_config(tmp_path, "run.name=whole", "run.steps=20")
    assert run(whole) == 0
    killed = make_config(tmp_path, "run.name=killed", "run.steps=20", "checkpoint.every=1", "checkpoint.keep=2")
    checkpoints = Path(killed.run.dir) / "killed" / "checkpoints"
    process = start(killed)
    def saving():
        return len(list(checkpoints.glob("step-*"))) >= 2 and any(p.name.startswith(".") for p in checkpoints.iterdir())

    wait_for(saving, "a save", process)
    process.kill()
    process.wait(30)
    process.stdout.close()
    assert not (checkpoints.parent / "status.json").exists()
    assert run(killed) == 0
    same_runs(whole, killed, 20)
    assert not [p for p in checkpoints.iterdir() if p.name.startswith(".tmp")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_exits_0(tmp_path, number):
    config = make_config(tmp_path, "run.steps=100000")
    lines = Path(config.run.dir) / "run" / "metrics.jsonl"
    process = start(config)
    wait_for(lambda: lines.exists() and lines.stat().st_size > 0, "the first step", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    state = status(config)
    assert state["status"] == "interrupted" and state["signal"] == number.name
    steps = [row["step"] for row in metrics(config)]
    assert steps == list(range(1, state["step"] + 1))
    assert (Path(config.run.dir) / "run/checkpoints" / f"step-{state['step']:08}" / "COMPLETE").exists()


def test_metrics_behind_the_checkpoint_and_a_torn_line_are_replaced(tmp_path):
    config = make_config(tmp_path, "run.steps=6")
    assert run(config) == 0
    before = metrics(config)
    path = Path(config.run.dir) / "run" / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 7, "loss": 0}) + '\n{"step": 8, "lo')
    assert run(make_config(tmp_path, "run.steps=8")) == 0
    after = metrics(config)
    assert after[:6] == before and [row["step"] for row in after] == list(range(1, 9)) and after[6]["loss"] > 1


def test_a_corrupt_checkpoint_is_left_for_the_one_before_it(tmp_path, capsys):
    config = make_config(tmp_path, "run.steps=6", "checkpoint.every=2")
    assert run(config) == 0
    newest = next((Path(config.run.dir) / "run/checkpoints/step-00000006/tensors").iterdir())
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    capsys.readouterr()
    again = make_config(tmp_path, "run.steps=7", "checkpoint.every=2")
    assert run(again) == 0
    out = capsys.readouterr().out
    assert "CORRUPT" in out and "step-00000004" in out
    assert [row["step"] for row in metrics(again)] == list(range(1, 8))


def test_a_checkpoint_of_another_model_or_other_data_is_refused(tmp_path):
    from helpers import train_model, write_text

    from dstrain.config.errors import InputError

    config = make_config(tmp_path)
    assert run(config) == 0
    with pytest.raises(InputError, match=r"another model \(model.hidden_size: 24 -> 32\)"):
        run(make_config(tmp_path, model=train_model(hidden_size=32)))
    write_text(tmp_path / "other.txt", seed=1)
    with pytest.raises(InputError, match="other data"):
        run(make_config(tmp_path, f"data.text={tmp_path / 'other.txt'}"))
    assert status(config)["status"] == "finished"  # of the run that is there, which the refused starts did not touch
    assert run(make_config(tmp_path, "run.steps=7")) == 0


def test_a_run_resumes_in_another_precision_from_the_masters(tmp_path):
    """The FP32 masters of a BF16 run are the weights that an FP32 run goes on with."""
    assert run(make_config(tmp_path, "precision=bf16", "optim.moments=fp32")) == 0
    bf16 = make_config(tmp_path, "precision=bf16", "optim.moments=fp32")
    masters = final_tensors(bf16, 6)
    fp32 = make_config(tmp_path, "precision=fp32", "optim.moments=fp32", "run.steps=7", "schedule.learning_rate=[{until: 1e6, value: 0}]")
    assert run(fp32) == 0
    weights = final_tensors(fp32, 7)
    name = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(weights[name].view(-1), masters["optimizer.master." + name])


def test_two_processes_cannot_share_a_run_folder(tmp_path):
    from dstrain.config.errors import InputError
    from dstrain.train.run_folder import RunFolder

    held = RunFolder(tmp_path / "runs" / "run")
    with pytest.raises(InputError, match="in use by another process"):
        run(make_config(tmp_path))
    del held


def test_a_broken_disk_ends_the_run_with_its_reason_even_where_no_status_can_be_written(tmp_path, monkeypatch):
    def broken(reason):
        def fail(*_, **__):
            raise OSError(errno.EIO, reason)

        return fail

    monkeypatch.setattr(JsonLines, "write", broken("metrics"))
    monkeypatch.setattr(RunFolder, "write_status", broken("status"))
    with pytest.raises(OSError, match="metrics"):
        run(make_config(tmp_path))


def test_run_steps_ends_the_run_there_even_behind_the_schedules_tokens(tmp_path):
    """A step is 64 tokens: the schedule alone would end after 2 of the 4 steps."""
    assert run(make_config(tmp_path, "schedule.tokens=100", "run.steps=null", "run.name=schedule")) == 0
    assert len(metrics(make_config(tmp_path, "run.name=schedule"))) == 2
    assert run(make_config(tmp_path, "schedule.tokens=100", "run.steps=4")) == 0
    assert len(metrics(make_config(tmp_path))) == 4


def test_every_batch_of_training_and_held_out_samples_is_checked_against_the_vocabulary(tmp_path):
    """Files too large to be looked through at the start are caught when the sample is read."""
    from helpers import train_model

    from dstrain.config.errors import InputError
    from dstrain.data.indexed import IndexedDataset, IndexedWriter
    from dstrain.data.samples import EvalWindows
    from dstrain.train.run_data import Checked

    with IndexedWriter(str(tmp_path / "heldout")) as writer:
        writer.add_document([1, 2, 3, 4, 5, 6, 7, 8, 319, 320])
    windows = Checked(EvalWindows(IndexedDataset(str(tmp_path / "heldout")), 4, 1), train_model(), "heldout")
    assert len(windows) == 3 and windows.batch(0, 1)[0].shape == (1, 6)
    with pytest.raises(InputError, match="heldout: token id 320 in sample 2"):
        windows.batch(2, 1)
