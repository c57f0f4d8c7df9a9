"""Layouts in FP32, BF16 and FP8: as near to the single process as their rounding allows."""

import pytest
import torch
from helpers import train_model
from ranks import spawn
from recorded import Recorder, assert_same_run, whole
from test_layouts import config_of

STEPS = 6
# Wide enough for two tiles of 128 in a row of hidden states, the second one not full.
FP8_MODEL = train_model(
    num_hidden_layers=2, num_nextn_predict_layers=2, hidden_size=192, intermediate_size=256, moe_intermediate_size=96,
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
)
MODEL = train_model(num_hidden_layers=3, num_nextn_predict_layers=2)
FP32 = {name: {"pp": 2, "schedule": name} for name in ("1f1b", "zb1p", "dualpipe", "dualpipev")} | {"ep 2": {"ep": 2}}
DUAL = {"pp": 2, "schedule": "dualpipe"}
HALF = ("bf16", "fp8")


def half_config(tmp_path, precision, micro, **parallel):
    return config_of(tmp_path, f"precision={precision}", f"batch.micro_sequences={micro}", model=FP8_MODEL, **parallel)


def run_all(rank, size, cases):
    return {case: Recorder(config, config.precision.name, size, rank).steps(steps)
            for case, (config, steps) in cases.items()}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("runs")
    cases = {case: (config_of(tmp_path, model=MODEL, **parallel), 1) for case, parallel in FP32.items()}
    for precision in HALF:
        cases[precision] = half_config(tmp_path, precision, 2, **DUAL), STEPS
    cases["fp8 dispatch"] = half_config(tmp_path, "fp8", 2, ep=2, dispatch="fp8"), STEPS
    return spawn(run_all, 2, cases, timeout=300)


def test_the_first_step_in_fp32_equals_the_single_process(of_ranks, tmp_path):
    reference = Recorder(config_of(tmp_path, model=MODEL), "fp32").steps(1)
    for case in FP32:
        print(case)
        assert_same_run([one[case] for one in of_ranks], reference, loss=1e-6, grad=1e-4, change=None)


def distance(a, b):
    """Two runs -> how far apart their losses are at most, and their first gradients as a whole; both relative."""
    losses = [abs(x[1]["loss"] / y[1]["loss"] - 1) for x, y in zip(a[0], b[0], strict=True)]
    first, second = ({n: g.double() for n, g in whole([history[0][0] for history in run]).items()} for run in (a, b))
    apart = torch.cat([first[name] - second[name] for name in second]).norm()
    return max(losses), (apart / torch.cat(list(second.values())).norm()).item()


@pytest.mark.parametrize("precision", HALF)
def test_dualpipe_in_bf16_and_fp8_stays_with_the_single_process(of_ranks, tmp_path, precision):
    """Every product has the same operands as there, FP32 sums of gradients have another order.

    So first gradients differ by FP32's rounding, 2^-24 times a small factor; afterwards by the few weights that this
    pushes over an edge between two numbers of BF16, until a token of these few goes to another expert. That moves a loss
    by some 1e-4, as another cutting into micro-batches does; half a unit in BF16's last place is 2^-9.
    """
    found, (reference,) = [one[precision] for one in of_ranks], single(tmp_path, precision, 2)
    losses, grads = distance(found, [reference])
    assert found[0][0][1]["loss"] == pytest.approx(reference[0][1]["loss"], rel=1e-9)
    assert grads < 1e-6 and losses < 2**-9
    assert not any(metrics["skipped"] for _, metrics, *_ in found[0])


def single(tmp_path, precision, micro):
    return [Recorder(half_config(tmp_path, precision, micro), precision).steps(STEPS)]


def test_fp8_dispatch_moves_a_run_less_than_other_micro_batches_do(of_ranks, tmp_path):
    """At most three times as far from the single process as two of its own cuttings of the batch from each other."""
    reference = single(tmp_path, "fp8", 2)
    gaps = distance(single(tmp_path, "fp8", 4), reference)
    found = distance([one["fp8 dispatch"] for one in of_ranks], reference)
    assert 0 < gaps[0] < 0.01 and 0 < gaps[1] < 0.01
    assert all(apart <= 3 * gap for apart, gap in zip(found, gaps)), (found, gaps)
