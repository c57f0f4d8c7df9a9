"""tools/measure_phases.py: a phase's time is its own, and what the tool writes is what `dstrain plan` reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from dstrain.planner.measured import load_factors

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from measure_phases import Clock  # noqa: E402


def test_time_inside_counts_for_the_inner_name_alone():
    clock = Clock(torch.device("cpu"))
    ticks = iter([0, 3, 7, 12])  # outer begins, inner begins, inner ends, outer ends
    clock.now = lambda: next(ticks)
    assert clock.timed("outer", lambda: clock.timed("inner", lambda: 5)) == 5
    assert dict(clock.seconds) == {"outer": 3 + 5, "inner": 4}


def test_two_ranks_give_a_file_that_predicts_their_step(tmp_path):
    """Every phase that the run has is there. The prediction's error is the README's to say; here only its size."""
    out = tmp_path / "mine.yaml"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "measure_phases.py"), f"out={out}", "ranks=2", "steps=2",
         "cluster=cpu_2cores", "model=tiny", "precision=fp32", "run.device=cpu", "parallel.ep=2", "batch.sequences=4",
         "batch.micro_sequences=1", "data.sequence_length=64"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = yaml.safe_load(out.read_text())["milliseconds"]
    phases = {f"{phase} {part}" for phase in ("attention", "experts") for part in "FBW"}
    phases |= {f"{phase} {part}" for phase in ("dispatch", "combine") for part in "FB"}
    assert names.keys() >= phases | {"head F", "embed F", "merge F", "merge W", "reduce", "optimizer"}
    assert min(names[phase] for phase in phases) > 0 and load_factors(str(out)).keys() == names.keys()
    last = json.loads(done.stdout.splitlines()[-1])
    assert 1 / 3 < last["ratio"] < 3
