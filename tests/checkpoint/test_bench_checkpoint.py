"""tools/bench_checkpoint.py at a tiny size: it writes what training would save; its shares are those of its times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["model.hidden_size=64", "model.intermediate_size=64", "model.moe_intermediate_size=32",
         "model.num_hidden_layers=2", "model.vocab_size=320", "data.vocab_size=320"]


def test_a_round_measures_disk_save_and_restore(tmp_path):
    out = tmp_path / "t.md"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_checkpoint.py"), "model=tiny", *SIZES, "sequence=16", "batch=1",
         "rounds=1", "steps=2", "threads=1", f"folder={tmp_path}", f"out={out}"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Of bf16 with masters a parameter takes 2 + 4 + 2 · 2 bytes; gate and norms are FP32 without a master, 4 + 4.
    from dstrain.config.compose import compose
    from dstrain.model.count import count_parameters

    parameters = count_parameters(compose("train", ["model=tiny", *SIZES])[0].model).total
    assert found["gb"] * 1e9 == pytest.approx(10 * parameters, rel=0.03)
    (only,) = found["rounds"]
    assert found["still_share"] == only["still"] / only["durable"]
    assert found["write_rate_share"] == only["disk_write"] / only["durable"]
    assert min(only[key] for key in ("disk_write", "disk_read", "still", "durable", "verify", "load")) > 0
    assert only["steps_behind"] >= 0 and "| plain write and fsync |" in out.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["t.md"]  # nothing is left behind
