"""tools/bench_decode.py on a small model: what it counts, and that it runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_decode.py"


def bench(*options):
    return subprocess.run([sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=300)


def test_rows_of_drafts_and_contexts():
    done = bench("model=tiny", "precisions=fp32", "batches=1", "peers=none", "drafts=0,1", "compile=false", "threads=1",
                 "prompt=8", "new=9", "rounds=2", "contexts=4,12")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    plain, drafted = summary["rows"]
    assert (plain["accepted"], drafted["same_text"]) == (0, 1)
    found = summary["dstrain_drafts_1_fp32_batch1"]
    assert found["expected"] == pytest.approx((1 + found["accepted"]) / found["cost"])
    # Of two rounds, each with the same prompts for both, the median is the mean.
    for key, of in (("cost", "step_seconds"), ("measured", "tokens_per_second")):
        pairs = zip(drafted["rounds"][of], plain["rounds"][of])
        assert found[key] == pytest.approx(sum(a / b for a, b in pairs) / 2)
    assert f"; {found['measured']:.2f} times the tokens per second" in done.stdout
    # tiny: 4 layers whose cache has 64 + 16 entries a token, in FP32
    (growth,) = summary["growth"]
    assert [(row["context"], row["cache_bytes"]) for row in growth["rows"]] == [(4, 4 * 4 * 80 * 4), (12, 12 * 4 * 80 * 4)]


def test_unknown_options_are_named():
    assert "unknown option 'batch'; valid: model, " in bench("batch=1").stderr
