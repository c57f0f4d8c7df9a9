"""Every parallel layout trains what one process trains: the right values are that process's, in float64.

Rate 1e-3 without warm-up, gamma 0.01, weights clipped and decayed: all of a step but its speed. Samples too: the data
ranks together read what the single process reads, each sample once (FAULTS A18, C07).
"""

import dataclasses

import pytest
from helpers import make_config, train_model
from ranks import spawn
from recorded import Recorder, assert_same_run

STEPS = 6
# Units: embed, 3 blocks of which one is dense, head, 4 MTP modules with a head each.
MODEL = train_model(num_hidden_layers=3, num_nextn_predict_layers=4)
# What a batch is; all others are BATCH.
BATCH, MASK, LARGE = (), ("data.document_mask=true",), ("batch.sequences=16",)
RAMP = ("batch.ramp={start: 4, until: 100, multiple: 4}",)  # four sequences in the first three steps, then eight
PP2, PP4, EP2, EP4 = {"pp": 2}, {"pp": 4}, {"ep": 2}, {"ep": 4}
LOCKSTEP = {"overlap": False}
ONE_F, ZB, DUAL, DUAL_V = ({"schedule": name} for name in ("1f1b", "zb1p", "dualpipe", "dualpipev"))
LAYOUTS = {
    2: {
        "dp 2": (BATCH, {}),
        "ep 2": (BATCH, EP2),
        "ep 2, recomputed": (BATCH, EP2 | {"recompute": "block"}),
        "1f1b pp 2": (BATCH, PP2 | ONE_F),
        "zb1p pp 2": (BATCH, PP2 | ZB),
        "dualpipe pp 2": (BATCH, PP2 | DUAL),
        "dualpipe pp 2, not overlapped": (BATCH, PP2 | DUAL | LOCKSTEP),
        "dualpipe pp 2, ramp": (RAMP, PP2 | DUAL),
        "dualpipev pp 2": (BATCH, PP2 | DUAL_V),
    },
    4: {
        "dp 4": (BATCH, {}),
        "ep 4": (BATCH, EP4),
        "ep 4 on 2 nodes": (BATCH, EP4 | {"ranks_per_node": 2}),
        "edp 2, ep 2, ramp": (RAMP, EP2),
        "1f1b pp 4": (BATCH, PP4 | ONE_F),
        "zb1p pp 4": (BATCH, PP4 | ZB),
        "dualpipe pp 4": (BATCH, PP4 | DUAL),
        "dualpipe pp 4, not overlapped": (BATCH, PP4 | DUAL | LOCKSTEP),
        "dualpipev pp 4": (BATCH, PP4 | DUAL_V),
        "dualpipev pp 4, not overlapped": (BATCH, PP4 | DUAL_V | LOCKSTEP),
        "dualpipe pp 2, dp 2": (BATCH, PP2 | DUAL),
        "dualpipe pp 2, ep 2": (BATCH, PP2 | EP2 | DUAL),
        "dualpipe pp 2, ep 2, document mask": (MASK, PP2 | EP2 | DUAL),
        "dualpipe pp 2, ep 2, recomputed": (BATCH, PP2 | EP2 | DUAL | {"recompute": "block"}),
        "dualpipev pp 2, ep 2": (BATCH, PP2 | EP2 | DUAL_V),
    },
    8: {
        "dualpipe pp 2, ep 2, edp 2": (LARGE, PP2 | EP2 | DUAL),
        "dualpipev pp 4, ep 2": (LARGE, PP4 | EP2 | DUAL_V),
        "dualpipe pp 2, ep 4 on 2 nodes": (LARGE, PP2 | EP4 | DUAL | {"ranks_per_node": 2}),
    },
}


def config_of(tmp_path, *overrides, model=MODEL, **parallel):
    config = make_config(
        tmp_path, "batch.sequences=8", "batch.micro_sequences=1", "optim.moments=fp32", "data.sequence_length=12",
        *overrides, model=model,
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout=60.0, **parallel))


def run_all(rank, size, configs, steps):
    return {case: Recorder(config, "fp64", size, rank).steps(steps) for case, config in configs.items()}


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_six_steps_equal_the_single_process_in_fp64(tmp_path, size):
    cases = LAYOUTS[size]
    references = {batch: Recorder(config_of(tmp_path, *batch)).steps(STEPS) for batch in {b for b, _ in cases.values()}}
    for batch, reference in references.items():
        assert reference[0][1]["lr"] == 1e-3 and reference[0][1]["bias_speed"] == 0.01
        assert all(bias.abs().max() > 0 for bias in reference[-1][3].values())
        ramp = [metrics["batch_sequences"] for _, metrics, *_ in reference]
        assert ramp == [4, 4, 4, 8, 8, 8] if batch == RAMP else len(set(ramp)) == 1
    configs = {case: config_of(tmp_path, *batch, **parallel) for case, (batch, parallel) in cases.items()}
    results = spawn(run_all, size, configs, STEPS, timeout=540)
    for case, (batch, _) in cases.items():
        print(case)
        assert_same_run([result[case] for result in results], references[batch])
