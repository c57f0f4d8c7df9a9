"""A run's record in W&B: what reaches it, what a resume does to it, and that the run goes on whatever happens there.

wandb itself is the fake of tests/fake_wandb, in the process where wandb would be; what it was called with is compared
with metrics.jsonl and eval.jsonl.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers import make_config, metrics, run, status, train_model
from launched import overrides, ranks

from dstrain.config.errors import InputError
from dstrain.config.schema import TelemetryConfig
from dstrain.telemetry import wandb_run
from dstrain.telemetry.wandb_names import eval_values, layer_names, step_values
from dstrain.telemetry.wandb_run import NoWandb, start_wandb

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["layer_01", "layer_02", "mtp_1", "mtp_2"]
RECORD = {"loss": 1.5, "moe_load": [[1, 1], [2, 0]]}


class Fake:
    """The fake wandb of one test."""

    def __init__(self, folder: Path, monkeypatch):
        self.path, self.monkeypatch = folder / "calls.jsonl", monkeypatch
        monkeypatch.setenv("FAKE_WANDB_CALLS", str(self.path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/fake_wandb"), str(ROOT)]))
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        self.waits(90.0)  # where a loaded machine is slow, wandb is not late

    def does(self, behaviour: str) -> None:
        self.monkeypatch.setenv("FAKE_WANDB", behaviour)

    def waits(self, seconds: float) -> None:
        self.monkeypatch.setattr(wandb_run, "WAIT", seconds)

    def calls(self, name: str) -> list[dict]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [arguments for called, arguments in map(json.loads, lines) if called == name]

    def rows(self) -> list[dict]:
        return [call["row"] for call in self.calls("log")]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    return Fake(tmp_path, monkeypatch)


class Record:
    """A record by itself, without a run, and what it says."""

    def __init__(self, folder: Path, mode: str = "online"):
        self.said: list[str] = []
        config = {"code": {}, "model": {"name": "tiny"}}
        self.run = start_wandb(TelemetryConfig(wandb=mode), folder, train_model(), "a run", config, self.said.append)

    def warnings(self) -> list[str]:
        return [line for line in self.said if line.startswith("WARNING")]

    def up(self) -> None:
        """Wait until wandb has started."""
        until(lambda: self.run._exchange() or self.run.directory)


def until(happens, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_and_its_continuation_from_an_older_step_are_one_record_with_an_axis_of_its_own(tmp_path, fake, capfd):
    fake.does("chatter")
    config = make_config(
        tmp_path, "telemetry.wandb=online", "run.steps=5", "checkpoint.every=3", "eval.every=5", "eval.sequences=2",
        "telemetry.wandb_project=mine", "telemetry.wandb_group=together", "telemetry.wandb_entity=us",
    )
    assert run(config) == 0
    first, folder = metrics(config), Path(config.run.dir) / config.run.name
    shutil.rmtree(folder / "checkpoints" / "step-00000005")  # the next start goes on from step 3
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=7))
    config = dataclasses.replace(config, telemetry=dataclasses.replace(config.telemetry, wandb_name="renamed"))
    assert run(config) == 0
    second = metrics(config)
    assert [row["step"] for row in second] == list(range(1, 8)) and second[:3] == first[:3]

    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert [record["step"] for record in evaluations] == [5]
    steps = [step_values(row, LAYERS) for row in first + second[3:]]
    rows = [row for row in fake.rows() if not any(key.startswith("eval/") for key in row)]
    assert rows == steps  # 1 to 5, then 4 to 7: nothing is lost, every row says its step
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 4, 5, 6, 7]
    evals = [row for row in fake.rows() if any(key.startswith("eval/") for key in row)]
    assert evals[-1] == eval_values(evaluations[0]) and [row["step"] for row in evals] == [5, 5]
    axis = [{"name": "step", "hidden": True}, {"name": "*", "step_metric": "step"}]
    assert fake.calls("define_metric") == 2 * axis
    assert fake.calls("finish") == 2 * [{"exit_code": 0}]

    starts = fake.calls("init")
    assert len(starts) == 2 and starts[0]["id"] == starts[1]["id"] == (folder / "wandb.id").read_text().strip()
    for start, name in zip(starts, ("run", "renamed")):
        assert (start["resume"], start["mode"], start["dir"]) == ("allow", "online", str(folder))
        assert (start["project"], start["entity"], start["group"], start["name"]) == ("mine", "us", "together", name)
        attached = start["config"]
        assert attached["model"] == json.loads(json.dumps(dataclasses.asdict(config.model)))
        assert attached["optim"] == dataclasses.asdict(config.optim)
        assert attached["layout"] == {"ranks": 1, "pp": 1, "ep": 1, "edp": 1, "dp": 1, "lines": []}
        assert re.fullmatch("[0-9a-f]{12}", attached["code"]["digest"])
        if (ROOT / ".git").exists():
            assert re.fullmatch("[0-9a-f]{40}(-dirty)?", attached["code"]["git"])
    said = capfd.readouterr()
    assert "noise" not in said.out and "WARNING" not in said.out
    assert "wandb: https://wandb.example/me/project/runs/1" in said.out
    assert "noise on standard output" in (folder / "logs/wandb.log").read_text()


def test_steps_201_to_212_are_kept_when_a_run_that_was_at_212_goes_on_from_200(tmp_path, fake):
    for first, last in ((1, 212), (201, 220), (191, 230)):
        record = Record(tmp_path)
        for step in range(first, last + 1):
            record.run.step(RECORD | {"step": step, "loss": 1 / step})
        record.run.finish()
        assert record.warnings() == []
    rows = [row for row in fake.rows() if "moe/load" not in row]
    assert [row["step"] for row in rows] == [*range(1, 213), *range(201, 221), *range(191, 231)]
    assert all(row["loss/total"] == 1 / row["step"] for row in rows)
    assert len({start["id"] for start in fake.calls("init")}) == 1
    histograms = [row for row in fake.rows() if "moe/load" in row]
    assert [row["step"] for row in histograms] == [50, 100, 150, 200, 200]
    assert histograms[0]["moe/load"]["counts"] == [1] + 31 * [0] + [2] + 30 * [0] + [1]  # loads 0, 1, 1, 2 of 2


def test_only_the_first_rank_records(tmp_path, fake):
    model = train_model(num_nextn_predict_layers=1, mtp_depth_weights=None)
    config = make_config(tmp_path, "telemetry.wandb=online", "run.steps=3", "batch.micro_sequences=1", model=model)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, ep=2))
    with ranks(tmp_path, 2, overrides(config)) as job:
        codes = [process.wait(120) for process in job.processes]
        assert codes == [0, 0], job.text()
    rows = [json.loads(line) for line in (Path(config.run.dir) / "run/metrics.jsonl").read_text().splitlines()]
    assert fake.rows() == [step_values(row, layer_names(model)) for row in rows] and len(rows) == 3
    (start,) = fake.calls("init")
    layout = start["config"]["layout"]
    assert (layout["ranks"], layout["ep"], layout["edp"]) == (2, 2, 1) and layout["lines"]


@pytest.mark.parametrize("behaviour, warning", [
    ("raise init", "RuntimeError: init fails; nothing is recorded there"),
    ("hang init", "not everything was sent within 1 s"),
])
def test_a_run_goes_on_without_wandb_and_says_so_once(tmp_path, fake, capfd, behaviour, warning):
    fake.does(behaviour)
    if behaviour == "hang init":
        fake.waits(1.0)
    config = make_config(tmp_path, "telemetry.wandb=online", "run.steps=6", "checkpoint.every=2")
    assert run(config) == 0
    assert status(config)["status"] == "finished" and [row["step"] for row in metrics(config)] == list(range(1, 7))
    warnings = [line for line in capfd.readouterr().out.splitlines() if "WARNING" in line]
    assert len(warnings) == 1 and f"WARNING: wandb: {warning}" in warnings[0]


@pytest.mark.parametrize("behaviour, warning", [
    ("raise online", "RuntimeError: online fails; recording offline"),
    ("raise define_metric", "RuntimeError: define_metric fails; nothing is recorded there"),
    ("raise log", "RuntimeError: log fails; some records are missing there"),
    ("raise finish", "its process failed at the end"),
    ("hang log", "not everything was sent within 1 s; `wandb sync "),
    ("hang finish", "not everything was sent within 1 s; `wandb sync "),
])
def test_whatever_fails_there_is_one_warning(tmp_path, fake, behaviour, warning):
    fake.does(behaviour)
    record = Record(tmp_path)
    if "hang" in behaviour:
        record.up()
        fake.waits(1.0)
    for step in range(1, 7):
        record.run.step(RECORD | {"step": step})
    record.run.finish()
    assert len(record.warnings()) == 1 and f"WARNING: wandb: {warning}" in record.warnings()[0]
    assert not alive(record.run.process.pid)
    if behaviour == "raise log":
        assert len(fake.rows()) == 6  # each is tried
    if behaviour == "raise online":
        assert [start["mode"] for start in fake.calls("init")] == ["offline"] and len(fake.rows()) == 6


def test_a_start_that_hangs_is_given_up_and_nothing_is_kept_for_it(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(wandb_run, "START", 0.5)
    fake.does("hang init")
    record = Record(tmp_path)
    until(lambda: fake.calls("init"))
    time.sleep(0.5)
    for step in (1, 2, 3):
        record.run.step(RECORD | {"step": step})
    assert len(record.warnings()) == 1 and "has not started within 0 s" in record.warnings()[0]
    assert not record.run.pending and not alive(record.run.process.pid)
    record.run.finish()
    record.run.close()
    assert len(record.warnings()) == 1


def test_what_wandb_does_not_take_is_kept_up_to_a_limit_and_no_step_waits_for_it(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(wandb_run, "LIMIT", 50_000)
    fake.waits(0.5)
    fake.does("hang log")
    record = Record(tmp_path)
    record.up()
    for step in range(1, 1001):  # some 200 bytes each; a pipe takes 64 KiB
        record.run.step(RECORD | {"step": step, "note": 0.123456789})
        assert len(record.run.pending) <= 50_000
    assert len(record.run.pending) > 49_000
    assert len(record.warnings()) == 1 and "does not keep up" in record.warnings()[0]
    record.run.finish()
    assert len(record.warnings()) == 2 and not alive(record.run.process.pid)


def test_a_large_row_gets_through_in_pieces(tmp_path, fake):
    record = Record(tmp_path)
    shares = {f"source-{i}": i / 7 for i in range(4_000)}  # some 150 KB, a pipe takes 64 KiB
    record.run.step(RECORD | {"step": 1, "data_shares": shares})
    assert record.run.pending
    record.run.finish()
    row = fake.rows()[0]
    assert record.warnings() == [] and not [name for name in shares if row[f"data/shares/{name}"] != shares[name]]


def test_the_process_may_die(tmp_path, fake):
    record = Record(tmp_path)
    record.up()
    os.kill(record.run.process.pid, signal.SIGKILL)
    until(lambda: record.run.step(RECORD | {"step": 1}) or record.warnings())
    record.run.step(RECORD | {"step": 2})
    record.run.evaluation({"step": 2, "loss": 1.0, "whole": False})
    record.run.finish()
    assert len(record.warnings()) == 1 and "its process has ended" in record.warnings()[0]


def test_a_run_that_fails_or_is_killed_is_marked_so_and_its_rows_are_sent(tmp_path, fake):
    record = Record(tmp_path)
    record.run.step(RECORD | {"step": 1})
    record.up()
    record.run.close()  # as the end of a killed process does: there is no last word
    record.run.close()
    record.run.process.wait(60)
    assert fake.calls("finish") == [{"exit_code": 1}] and [row["step"] for row in fake.rows()] == [1]


def test_signals_for_the_run_do_not_end_the_record(tmp_path, fake):
    record = Record(tmp_path)
    record.up()
    assert os.getpgid(record.run.process.pid) != os.getpgid(0)  # Ctrl-C does not reach it at all
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(record.run.process.pid, number)
    record.run.step(RECORD | {"step": 1})
    record.run.finish()
    assert record.warnings() == [] and fake.calls("finish") == [{"exit_code": 0}] and len(fake.rows()) == 1


def test_the_id_is_made_once_and_a_spoilt_file_makes_a_new_one(tmp_path, fake):
    first = wandb_run.run_id(tmp_path)
    assert re.fullmatch("[0-9a-f]{8}", first) and wandb_run.run_id(tmp_path) == first
    (tmp_path / "wandb.id").write_text("someone-s_own1\n")
    assert wandb_run.run_id(tmp_path) == "someone-s_own1"
    (tmp_path / "wandb.id").write_bytes(b"\xff / \n")
    assert re.fullmatch("[0-9a-f]{8}", wandb_run.run_id(tmp_path))
    (tmp_path / "file").write_text("no folder")
    record = Record(tmp_path / "file")
    assert isinstance(record.run, NoWandb) and len(record.warnings()) == 1


def test_disabled_starts_nothing(tmp_path, fake, capfd):
    config = make_config(tmp_path, "telemetry.wandb=disabled", "run.steps=2")
    assert run(config) == 0
    assert not fake.path.exists() and not (Path(config.run.dir) / "run/wandb.id").exists()
    assert "wandb" not in capfd.readouterr().out


@pytest.mark.parametrize("override, line", [
    ("telemetry.wandb=on", "telemetry.wandb=on: must be one of auto, online, offline, disabled"),
    ("telemetry.wandb_project=a/b", "telemetry.wandb_project='a/b': must be null or text of at most 128 characters,"),
    ("telemetry.wandb_entity=", "telemetry.wandb_entity='': must be null or text of at most 128 characters"),
    (f"telemetry.wandb_group={'x' * 129}", "must be null or text of at most 128 characters"),
])
def test_impossible_keys(tmp_path, override, line):
    with pytest.raises(InputError) as caught:
        make_config(tmp_path, override)
    assert line in str(caught.value)
