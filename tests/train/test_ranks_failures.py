"""A rank that dies while a save is under way ends the others: soon, with exit code 1, one line and a status."""

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import ranks
from helpers import write_text
from test_ranks_bad_input import command, run_commands

from dstrain.checkpoint import store
from dstrain.train.step import Stepper


def rank_1_dies(rank: int, size: int, ports: list[int], arguments: list[str], folder: str) -> None:
    """Rank 1 never writes its part of the checkpoint of step 2, and dies in step 3."""
    step = Stepper.step

    def dies(self, state):
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, state)

    if rank == 1:
        store.write_tensors = lambda *args: threading.Event().wait()
        Stepper.step = dies
    ((code, _),) = run_commands(rank, size, ports, [arguments])
    (Path(folder) / "code.json").write_text(json.dumps(code))


def test_a_rank_that_dies_during_a_save_ends_the_others_without_waiting_for_its_part(tmp_path, monkeypatch):
    """The save alone would wait half an hour for the part of rank 1; parallel.timeout bounds that here."""
    write_text(tmp_path / "text.txt", lines=40)
    arguments = command(tmp_path, "run", "run.steps=5 checkpoint.every=2 parallel.timeout=3")
    monkeypatch.setattr(ranks, "GRACE", 60)
    with pytest.raises(ranks.RankFailure, match="rank 1: died with exit code -9") as failure:
        ranks.spawn(rank_1_dies, 2, ranks.free_ports(1), arguments, str(tmp_path), timeout=120)
    assert "rank 0" not in str(failure.value)
    code = json.loads((tmp_path / "code.json").read_text())
    assert code == 1
    status = json.loads((tmp_path / "runs/run/status.json").read_text())
    assert (status["status"], status["step"]) == ("failed", 2)
    line = status["reason"]
    assert re.match(r"rank 1 on \S+ gives no sign of life", line), line
    assert re.search(r"rank 0 in step 3, .*: all-\S+ of .* over ranks 0, 1 failed: ", line), line
    assert "pair.cc" not in line and "typically" not in line
    assert line in (tmp_path / "runs/run/logs/rank-0.log").read_text()
