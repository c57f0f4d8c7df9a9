"""planner/trace.py and the measured profile of configs/phases against the published trace and its figures."""

import json
from pathlib import Path

import pytest

from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.model.unit import Unit
from dstrain.planner.job import Job
from dstrain.planner.measured import load_factors
from dstrain.planner.times import Times
from dstrain.planner.trace import read_trace

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "deepseek_v3_dualpipe_trace.json.gz"
# REFERENCE §4: milliseconds a layer
MEDIANS = {
    "attention F": 4.36, "attention B": 9.41, "attention W": 2.39, "experts F": 4.50, "experts B": 5.41,
    "experts W": 6.22, "dispatch F": 6.57, "combine F": 8.89, "dispatch B": 7.39, "combine B": 5.72,
}
V3 = ["recipe=deepseek_v3", "precision=fp8", "parallel.dispatch=fp8", "cluster=h800_2048", "phases=h800_v3"]


@pytest.mark.skipif(not TRACE.exists(), reason="the published trace is not part of the repository")
def test_published_trace_gives_the_published_medians():
    traced = read_trace(TRACE)
    assert traced.phases.keys() == MEDIANS.keys()
    for name, milliseconds in MEDIANS.items():
        assert traced.phases[name] == pytest.approx(milliseconds, abs=0.011), name
    assert traced.span == pytest.approx(129.0, abs=0.05)
    assert traced.compute == pytest.approx(124.3, abs=0.05) and traced.communication == pytest.approx(114.5, abs=0.05)
    assert traced.hidden_fraction == pytest.approx(0.963, abs=0.0005)


def event(category, name, start, duration, correlation=None, **more):
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": arguments, **more}


def test_kernels_count_for_the_annotation_of_their_launch(tmp_path):
    """By hand: the dispatch's kernel (10 to 50) has the computation of attn(F) (20 to 40) beside it for 20 of its 40."""
    events = [
        event("user_annotation", "dispatch(F)", 0, 4), event("cuda_runtime", "launch", 1, 1, 7),
        event("user_annotation", "attn(F)", 5, 4), event("cuda_runtime", "launch", 6, 1, 8),
        event("cuda_runtime", "launch", 100, 1, 9),
        event("kernel", "send", 10, 40, 7), event("kernel", "product", 20, 20, 8), event("kernel", "other", 60, 5, 9),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    traced = read_trace(path)
    assert traced.phases == {"dispatch F": 0.04, "attention F": 0.02}
    assert (traced.span, traced.compute, traced.communication, traced.hidden_fraction) == (0.04, 0.02, 0.04, 0.5)


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": []}'])
def test_what_is_no_trace_is_one_line(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError, match="trace.json: n"):
        read_trace(path)


@pytest.fixture(scope="module")
def v3():
    config = compose("plan", V3)[0]
    return Times(Job.of(config), load_factors(config.phases))


def test_measured_run_is_priced_as_measured(v3):
    assert {f"{p.name} {p.part}": s * 1e3 for p, s in v3.blocks[True].phases.items()} == pytest.approx(MEDIANS, rel=1e-9)


def test_predicted_pair_of_the_measured_chunks(v3):
    """REFERENCE §4: the pair of two 4-layer chunks took 129.0 ms, 96.3 % of its communication hidden.

    The medians' own arithmetic is 130.5 ms: they count two streams of mlp(W)'s kernels one after the other.
    """
    chunk = v3.stage([Unit("block", 10 + i) for i in range(4)])
    pair = v3.pair(chunk, chunk)
    assert pair.seconds * 1e3 == pytest.approx(130.5, abs=0.05)
    assert pair.hidden / pair.communication == pytest.approx(0.963, abs=0.03)
    alone = chunk.alone("F") + chunk.alone("BW")
    assert alone * 1e3 == pytest.approx(4 * sum(MEDIANS.values()), rel=1e-9) and alone > pair.seconds


def test_measured_times_scale_with_operations_and_bytes(v3):
    """Half the tokens a micro-batch: products and rows halve, quadratic attention quarters, weights stay to be read."""
    config = compose("plan", [*V3, "data.sequence_length=2048"])[0]
    half = Times(Job.of(config), v3.factors).blocks[True].phases
    for phase, seconds in v3.blocks[True].phases.items():
        ratio = half[phase] / seconds
        assert ratio == pytest.approx(0.5, abs=1e-9) if phase.communicates else 0.35 < ratio < 0.75, str(phase)
