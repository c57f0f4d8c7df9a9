"""tools/storm.py, briefly: its rounds at random moments, on one layout, with the same verdicts.

What it holds against a run (its own reading of checksums, safetensors and metrics) is tried on damage made by hand.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_config, run, train_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from storm_judge import checkpoints, differences, intact, leftovers, newest_intact  # noqa: E402


def storm(folder: Path, *options: str) -> dict:
    command = [sys.executable, str(ROOT / "tools/storm.py"), f"folder={folder}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            text, _ = process.communicate(timeout=600)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    summary = json.loads(text.splitlines()[-1])
    assert process.returncode == 0 and summary["good"], text
    return summary


def test_a_run_that_is_killed_and_left_without_disk_ends_as_the_undisturbed_one(tmp_path):
    summary = storm(tmp_path, "rounds=3", "seed=1", "layouts=edp2_ep2", "kinds=kill,disk,flip")
    assert summary["rounds"] == 3 and summary["stray"] == 0 and set(summary["kinds"]) == {"kill", "disk", "flip"}
    compared = summary["runs"]["edp2_ep2"]["compared"]
    assert min(compared[kind] for kind in ("weights", "moments", "biases", "averages", "generators")) > 0


@pytest.mark.long
def test_every_kind_of_disturbance_on_every_layout(tmp_path):
    summary = storm(tmp_path, "rounds=8", "seed=2")
    assert len(summary["kinds"]) == 8 and len(summary["runs"]) == 4


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The same run twice; checkpoints of steps 2, 4 and 5."""
    folder, paths = tmp_path_factory.mktemp("storm"), []
    for name in ("one", "other"):
        more = (f"run.name={name}", "run.steps=5", "checkpoint.every=2", "checkpoint.keep=3", "ema.decay=0.9")
        config = make_config(folder, *more, model=train_model(num_hidden_layers=2, num_nextn_predict_layers=0))
        assert run(config) == 0
        paths.append(Path(config.run.dir) / name)
    return paths


@pytest.fixture
def disturbed(two_runs, tmp_path):
    return shutil.copytree(two_runs[0], tmp_path / "one"), two_runs[1]


def test_the_judge_finds_the_newest_intact_checkpoint(disturbed):
    path, other = disturbed
    assert [step for step, _ in checkpoints(path)] == [5, 4, 2] and newest_intact(path) == 5
    assert differences(path, other) == ([], differences(other, path)[1]) and leftovers(path, 0) == []
    newest = path / "checkpoints/step-00000005"
    for file in sorted(file for file in newest.rglob("*") if file.is_file()):
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damaged in (data[:-2], flipped):
            file.write_bytes(damaged)
            assert not intact(newest) and newest_intact(path) == 4, file
        file.unlink()
        assert newest_intact(path) == 4, file
        file.write_bytes(data)
    assert intact(newest)


def test_the_judge_finds_what_differs_and_what_is_left(disturbed):
    path, other = disturbed
    for file in sorted((path / "checkpoints/step-00000005/tensors").iterdir()):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        (line,) = differences(path, other)[0]
        assert line.endswith(" differs")
        file.write_bytes(data)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert "metrics.jsonl has not each of the steps 1 to 5 once" in differences(path, other)[0]
    row = json.loads(lines[2])
    lines[2] = json.dumps(row | {"loss": row["loss"] * (1 + 2**-52)}) + "\n"
    (path / "metrics.jsonl").write_text("".join(lines))
    assert differences(path, other)[0] == ["metrics of step 3 differ"]
    (path / "checkpoints/.tmp-step-00000006-host-1").mkdir()
    (path / "checkpoints/step-00000002/COMPLETE").unlink()
    shutil.copytree(path / "checkpoints/step-00000004", path / "checkpoints/step-00000004.corrupt")
    (path / "status.json.part").write_text("")
    assert sorted(leftovers(path, 0)) == [
        "1 checkpoints are set aside, 0 were damaged", "checkpoints/.tmp-step-00000006-host-1 is left",
        "checkpoints/step-00000002 is not intact", "status.json.part is left",
    ]
