"""tools/bench_scale.py at tiny sizes, its straight line, and its charts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dstrain.config.compose import compose
from dstrain.model.count import count_parameters

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from bench_scale import DEFAULTS, line_through, points_of, summarise  # noqa: E402
from chart import HEIGHT, BOTTOM, LEFT, RIGHT, TOP, WIDTH, chart, nice, spaced  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def test_points_of_experts_and_ranks_are_measured(tmp_path):
    out = tmp_path / "scale.md"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_scale.py"), "axes=experts,ranks", "experts=8,16", "ranks=2",
         "layouts=ep", "model=tiny", "precision=fp32", "length=16", "tokens=32", "batch=2", "rounds=1", "steps=1",
         "threads=1", f"out={out}"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for row in found["axes"]["experts"]:
        keys = ["model=tiny", f"model.n_routed_experts={row['x']}"]
        parameters = count_parameters(compose("train", keys)[0].model).total
        # fp32: weights, gradients and two moments of BF16 (the counts say nothing of the gaps between parameters)
        assert row["state"] == pytest.approx((4 + 4 + 2 * 2) * parameters, rel=0.01)
        assert row["peak"] > row["state"] and 0 < row["passes"] < row["step"] and row["tokens"] == 32
    assert found["experts_time_ratio"] == found["axes"]["experts"][1]["passes"] / found["axes"]["experts"][0]["passes"]
    (two,) = found["axes"]["ranks"]
    assert two["x"] == 2 and two["tokens"] == 16 * 8
    names = {f"scale_{axis}_{what}.svg" for axis in ("experts", "ranks") for what in ("time", "memory")}
    assert {path.name for path in tmp_path.iterdir()} == names | {"scale.md"}


@pytest.mark.parametrize("axis", ["experts", "sequence", "layers", "mtp", "ranks"])
def test_every_point_is_a_valid_run_and_activates_the_same(axis):
    models = [compose("train", point["overrides"])[0] for point in points_of(axis, DEFAULTS, [])]
    assert len(models) == len(DEFAULTS[axis].split(",")) * (3 if axis == "ranks" else 1)
    tokens = {config.batch.sequences * config.data.sequence_length for config in models}
    assert len(tokens) == (len(models) if axis == "sequence" else 1)
    if axis == "experts":
        routed = {(c.model.num_experts_per_tok, c.model.moe_intermediate_size, c.batch.micro_sequences) for c in models}
        assert routed == {(4, 192, 16)} and tokens == {8192}


def test_a_straight_line_and_its_residual():
    assert line_through([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((3, 2, 0))
    # By hand: the mean is (2, 4), the slope 1 · 2 / 2; the line 1, 3, 5 … of these is off by 1/3, 2/3 and 1/3.
    first, slope, residual = line_through([(1, 3.0), (2, 3.0), (3, 5.0)])
    assert (first, slope) == pytest.approx((5 / 3, 1)) and residual == pytest.approx((2 / 3) / 3)
    rows = [{"x": x, "peak": 100 + 10 * x} for x in (1, 2, 4)]
    found = summarise({"sequence": rows})
    assert found["sequence_bytes_per_token"] == pytest.approx(10) and found["sequence_memory_residual"] < 1e-9


def test_a_chart_puts_points_where_their_values_are():
    drawn = ElementTree.fromstring(chart("a < b", "x", "y", {"one": [(0, 0), (50, 5), (100, 10)], "two": [(100, 2.5)]}))
    places = [(float(c.get("cx")), float(c.get("cy"))) for c in drawn.iter(f"{SVG}circle")]
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    middle = (LEFT + right) / 2
    right_ones = [(LEFT, bottom), (middle, (TOP + bottom) / 2), (right, TOP), (right, bottom - (bottom - TOP) / 4)]
    assert [x for place in places for x in place] == pytest.approx([x for place in right_ones for x in place])
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    numbers = [w for w in words if w in ("0", "2", "4", "6", "8", "10")]
    assert "a < b" in words and numbers == ["0", "2", "4", "6", "8", "10", "0"]  # of y, and the first of x


def test_steps_of_an_axis_are_round_and_labels_have_room():
    assert [nice(value) for value in (0.9, 1.0, 1.1, 2.2, 3.0, 7.0, 230.0)] == pytest.approx([1, 1, 2, 2.5, 5, 10, 250])
    assert spaced([1, 2, 4, 40], lambda value: 10 * value) == [1, 4, 40]
