"""wandb itself behind a run: what its own file holds, and a server of it on this machine that goes away in mid-run."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb_file
from helpers import make_config, metrics, run, train_model

from dstrain.config.schema import TelemetryConfig
from dstrain.telemetry import wandb_run
from dstrain.telemetry.wandb_names import LOAD, eval_values, step_values
from dstrain.telemetry.wandb_run import start_wandb
from test_wandb_run import LAYERS, RECORD, ROOT, alive, until

pytest.importorskip("wandb")
usual = wandb_run.WAIT


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """An environment where nobody has ever used wandb; a loaded machine has time."""
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(wandb_run, "WAIT", 120.0)


def test_an_offline_run_is_in_wandbs_file_number_by_number(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(wandb_run, "HISTOGRAM_EVERY", 8)
    config = make_config(tmp_path, "telemetry.wandb=offline", "run.steps=8", "eval.every=4", "eval.sequences=2")
    assert run(config) == 0
    folder = Path(config.run.dir) / config.run.name
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    rows = wandb_file.rows(path)
    assert [row for row in rows if "loss/total" in row] == [step_values(row, LAYERS) for row in metrics(config)]
    assert [row for row in rows if "eval/loss" in row] == [eval_values(row) for row in evaluations]
    (histogram,) = [row for row in rows if LOAD in row]
    assert histogram["step"] == 8 and histogram[LOAD]["_type"] == "histogram"
    assert sum(histogram[LOAD]["values"]) == sum(len(load) for load in metrics(config)[-1]["moe_load"])
    assert len(rows) == 11

    attached, values = wandb_file.run_of(path)
    assert (attached.run_id, attached.project, attached.display_name) == (
        (folder / "wandb.id").read_text().strip(), "dstrain", "run"
    )
    assert values["model"] == json.loads(json.dumps(dataclasses.asdict(config.model)))
    assert values["code"]["torch"] and values["parameters"]["main"] > 0 and values["layout"]["ranks"] == 1
    metric = {record.metric.glob_name or record.metric.name: record.metric for record in wandb_file.records(path)
              if record.WhichOneof("record_type") == "metric"}
    assert metric["*"].step_metric == "step" and metric["step"].options.hidden
    said = capfd.readouterr()
    lines = [line for line in said.out.splitlines() if "wandb" in line]
    assert all(line.startswith(("wandb: ", "waiting for wandb")) for line in lines) and "WARNING" not in said.out
    assert "Tracking run" not in said.out + said.err and "Tracking run" in (folder / "logs/wandb.log").read_text()


class Server:
    """What wandb needs of its server, in a process of its own."""

    def __init__(self, folder: Path):
        self.log = folder / "server.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/wandb_server.py"), str(self.log)], stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.process.stdout.readline())

    def requests(self, name: str) -> list[dict]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [content for called, content in map(json.loads, lines) if called == name]

    def history(self) -> list[dict]:
        return [json.loads(line) for sent in self.requests("history") for line in sent["content"]]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def server(tmp_path, monkeypatch):
    made = Server(tmp_path)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{made.port}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    yield made
    made.stop()


def start(folder: Path, said: list[str]):
    return start_wandb(TelemetryConfig(), folder, train_model(), "a run", {"code": {}}, said.append)


@pytest.mark.long
def test_a_server_gets_the_rows_and_a_continued_run_is_the_same_one_there(tmp_path, server):
    said: list[str] = []
    for first, last in ((1, 12), (11, 14)):
        record = start(tmp_path, said)
        for step in range(first, last + 1):
            record.step(RECORD | {"step": step, "loss": 1 / step})
        record.finish()
    assert not [line for line in said if "WARNING" in line], said
    assert len({(sent["name"], sent["project"]) for sent in server.requests("UpsertBucket")}) == 1
    identity = (tmp_path / "wandb.id").read_text().strip()
    assert f"wandb: http://127.0.0.1:{server.port}/me/dstrain/runs/{identity}" in said
    rows = server.history()
    assert [row["step"] for row in rows] == [*range(1, 13), *range(11, 15)]
    assert all(row["loss/total"] == 1 / row["step"] for row in rows)
    assert [row["_step"] for row in rows] == list(range(16))  # wandb's own step went on, and dropped nothing


@pytest.mark.long
def test_a_server_that_goes_away_in_mid_run_costs_no_row_and_a_bounded_wait(tmp_path, server, monkeypatch):
    said: list[str] = []
    record = start(tmp_path, said)
    record.step(RECORD | {"step": 1})
    until(lambda: record._exchange() or record.directory)
    server.stop()
    for step in range(2, 101):
        record.step(RECORD | {"step": step})
    monkeypatch.setattr(wandb_run, "WAIT", usual)
    record.finish()
    (warning,) = [line for line in said if "WARNING" in line]
    sync = f"`wandb sync --include-online {record.directory}` sends it"
    assert warning == f"WARNING: wandb: not everything was sent within 30 s; {sync}"
    assert not alive(record.process.pid)
    (path,) = Path(record.directory).glob("*.wandb")
    # what `wandb sync` sends
    assert [row["step"] for row in wandb_file.rows(path) if LOAD not in row] == list(range(1, 101))
