"""Every parallel layout trains what one process trains: the right values are that process's, in float64."""

import dataclasses

import pytest
from helpers import make_config, train_model
from ranks import spawn
from recorded import Recorder, assert_same_run

STEPS = 6
# Units: embed, 3 blocks of which one is dense, head, 4 MTP modules with a head each.
MODEL = train_model(num_hidden_layers=3, num_nextn_predict_layers=4)
LAYOUTS = {
    1: {},
    2: {
        "dp 2": {},
        "1f1b pp 2": {"pp": 2},
        "zb1p pp 2": {"pp": 2, "schedule": "zb1p"},
        "dualpipe pp 2": {"pp": 2, "schedule": "dualpipe"},
        "dualpipe pp 2, not overlapped": {"pp": 2, "schedule": "dualpipe", "overlap": False},
        "dualpipev pp 2": {"pp": 2, "schedule": "dualpipev"},
    },
    4: {
        "dp 4": {},
        "1f1b pp 4": {"pp": 4},
        "zb1p pp 4": {"pp": 4, "schedule": "zb1p"},
        "dualpipe pp 4": {"pp": 4, "schedule": "dualpipe"},
        "dualpipe pp 4, not overlapped": {"pp": 4, "schedule": "dualpipe", "overlap": False},
        "dualpipev pp 4": {"pp": 4, "schedule": "dualpipev"},
        "dualpipev pp 4, not overlapped": {"pp": 4, "schedule": "dualpipev", "overlap": False},
        "dualpipe pp 2, dp 2": {"pp": 2, "schedule": "dualpipe"},
    },
}


def config_of(tmp_path, **parallel):
    config = make_config(
        tmp_path, "batch.sequences=8", "batch.micro_sequences=1", "optim.moments=fp32", "data.sequence_length=12",
        model=MODEL,
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout=60.0, **parallel))


def run_all(rank, size, configs, precision, steps):
    return {case: Recorder(config, precision, size, rank).steps(steps) for case, config in configs.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_six_steps_equal_the_single_process_in_fp64(tmp_path, size):
    """Rate 1e-3 without warm-up, gamma 0.01, weights clipped and decayed: all of a step but its speed."""
    reference = Recorder(config_of(tmp_path)).steps(STEPS)
    assert reference[0][1]["lr"] == 1e-3 and reference[0][1]["bias_speed"] == 0.01
    assert all(bias.abs().max() > 0 for bias in reference[-1][3].values())
    configs = {case: config_of(tmp_path, **parallel) for case, parallel in LAYOUTS[size].items()}
    results = spawn(run_all, size, configs, "fp64", STEPS, timeout=400)
    for case in configs:
        print(case)
        assert_same_run([result[case] for result in results], reference)
