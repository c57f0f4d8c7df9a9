"""A rank that dies or stops is named, with what the others waited in, and none of them stays."""

import dataclasses
import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist
from helpers import make_config, status, train_model
from launched import overrides, ranks

from dstrain.parallel import watch as watching
from dstrain.parallel.place import Place
from dstrain.parallel.watch import Watch, diagnose
from dstrain.parallel.world import World

TIMEOUT = 6.0


def config_of(folder, *more):
    config = make_config(
        folder, "batch.sequences=8", "batch.micro_sequences=1", "run.steps=100000", *more,
        model=train_model(num_nextn_predict_layers=1, mtp_depth_weights=None),
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, pp=2, ep=2, timeout=TIMEOUT))


def fails(folder, config, number, victim):
    """The console's text and the survivors' exit codes, after a signal to one rank in a step.

    Behind a SIGKILL they get a SIGTERM, which torchrun and Slurm send as soon as a rank has died.
    """
    lines = folder / "runs/run/metrics.jsonl"
    with ranks(folder, 4, overrides(config)) as job:
        job.wait_for(lambda: lines.exists() and lines.read_text().count("\n") > 12, "some steps")
        os.kill(job.rank(victim), number)
        left = [process for rank, process in enumerate(job.processes) if rank != victim]
        if number == signal.SIGKILL:
            time.sleep(0.5)
            for process in left:
                os.kill(process.pid, signal.SIGTERM)
        codes = [process.wait(TIMEOUT + 60) for process in left]
    return job.text(), codes


@pytest.mark.parametrize(
    "number, victim",
    [(signal.SIGKILL, 2), (signal.SIGSTOP, 1), pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.long),
     pytest.param(signal.SIGKILL, 0, marks=pytest.mark.long)],
)
def test_a_rank_that_dies_or_stops_is_named(tmp_path, number, victim):
    config = config_of(tmp_path)
    text, codes = fails(tmp_path, config, number, victim)
    assert codes == [1, 1, 1]
    verdicts = [line for line in text.splitlines() if line.startswith("dstrain: ")]
    assert len(verdicts) == 1, text
    assert f"rank {victim} on " in verdicts[0]
    waited = verdicts[0].split(". The others: ")[-1] if victim else verdicts[0]
    assert re.search(r"rank \d.* in (pipeline rank \d, )?step \d+, ", waited), verdicts[0]
    for rank in set(range(4)) - {victim}:
        log = (tmp_path / f"runs/run/logs/rank-{rank}.log").read_text()
        assert f"this rank, {rank}, was in " in log and f"rank {victim} on " in log and "most recent call first" in log
    if victim:
        assert "gives no sign of life" in verdicts[0] and "last seen in step " in verdicts[0]
        assert status(config)["status"] == "failed" and f"rank {victim} on " in status(config)["reason"]


def test_a_rank_that_fails_by_itself_is_named_and_shows_its_traceback(tmp_path):
    """Rank 3 cannot read its samples any more: its data file goes away under it."""
    config = config_of(tmp_path)
    program = (
        "import sys, dstrain.train.step as step\n"
        "read = step.Stepper.micro_batches\n"
        "def broken(self, first, sequences):\n"
        "    if self.mesh.rank == 3 and first >= 16: raise ValueError('the disk is gone')\n"
        "    return read(self, first, sequences)\n"
        "step.Stepper.micro_batches = broken\n"
        "from dstrain.cli import main\n"
        "sys.exit(main(['train', *sys.argv[2:]]))\n"
    )
    with ranks(tmp_path, 4, overrides(config), program=program) as job:
        assert job.wait(120) == [1, 1, 1, 1], job.text()
    (verdict,) = [line for line in job.text().splitlines() if line.startswith("dstrain: ")]
    assert "rank 3 on " in verdict and "failed: step 3, reading its samples: ValueError: the disk is gone" in verdict
    assert "ValueError: the disk is gone" in job.outputs[3].read_text()  # its traceback, on its own console
    assert job.outputs[1].read_text().strip() == ""


def place(beats, waits=True, line=None, own=False, place="step 3, action 2 of 8"):
    return {"beats": beats, "place": place, "waits": waits, "line": line, "own": own}


def test_the_verdict_prefers_silence_to_a_failure_of_its_own_to_being_late():
    hosts = ["a", "a", "b", "b"]
    before = [place(5), place(5), place(5), place(5)]
    late, failed = place(9, waits=False, place="step 3, reading its samples"), place(9, line="step 3: boom", own=True)
    cut = place(9, line="all-reduce failed")
    line, who = diagnose(before, [cut, failed, place(5), late], hosts)
    assert who == [2] and line.startswith("rank 2 on b gives no sign of life") and "rank 1 in step 3: boom" in line
    line, who = diagnose(before, [cut, failed, place(9), late], hosts)
    assert who == [1] and line.startswith("rank 1 on a failed: step 3: boom")
    line, who = diagnose(before, [cut, place(9), place(9), late], hosts)
    assert who == [3] and line.startswith("rank 3 on b is late") and "rank 1, 2 in step 3, action 2 of 8" in line
    line, who = diagnose(before, [place(9), cut, place(9), place(9)], hosts)
    assert who == [1] and line.startswith("rank 1 on a was the first whose wait failed: all-reduce failed")


class SlowStore(dist.HashStore):
    """Its calls take a while, as on a busy machine; `inside` counts those that are under way."""

    inside = 0

    def clone(self):
        return self

    def set(self, key, value):
        self.inside += 1
        time.sleep(0.3)
        self.inside -= 1


def test_no_thread_is_in_a_call_of_the_store_once_the_watch_is_stopped(monkeypatch):
    """The end of the interpreter would abort the process there, after a run that is finished."""
    monkeypatch.setattr(watching, "POLL", 0.01)
    world = World(0, 2, 0, 2)
    world.store = SlowStore()
    watch = Watch(world, Place(), ["a", "b"], lambda line, speaks: None)
    watch.start()
    while not world.store.inside:
        time.sleep(0.01)
    watch.stop()
    assert not world.store.inside and "watch" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_without_a_move_in_a_step_reports_itself():
    """What finds a hanging GPU, where the host waits in a call that no timeout ends."""
    world, here = World(0, 2, 0, 2), Place()
    world.store = dist.HashStore()
    watch = Watch(world, here, ["a", "b"], lambda line, speaks: None, limit=0.2)
    for _ in range(2):  # outside a step nothing counts
        watch._check_limit()
        time.sleep(0.25)
    here.at(3, "action 1 of 4")
    watch._check_limit()
    with here.waiting("all-reduce of gradients"):
        watch._check_limit()
        assert watch.failure is None
        time.sleep(0.25)
        watch._check_limit()
    assert watch.failure == ("no progress for 0.2 s in step 3, action 1 of 4: waits in all-reduce of gradients", False)
