"""Names and values of the series in W&B. The right values are counted by hand, or numpy's."""

import json
import random

import numpy as np
import pytest
from helpers import train_model
from test_telemetry import CONTRACT

from dstrain.telemetry.wandb_names import NAMES, STEP, eval_values, layer_names, load_histogram, step_values

GROUPS = {"loss", "moe", "schedule", "speed", "data", "optim"}
RECORD = {
    "step": 7, "tokens": 448, "samples": 28, "loss": 7.5, "loss_main": 5.5, "loss_mtp": [5.25, 5.75],
    "loss_balance": 2.0, "lr": 1e-3, "grad_norm": 1.5, "step_time": 0.25, "tokens_per_second": 256.0, "mfu": 0.5,
    "moe_max_violation": 1.0,
    "moe_load": [[4, 4, 4, 4], [8, 6, 2, 0], [5, 3, 4, 4], [0, 0, 0, 0]], "bias_speed": 0.001, "mtp_weight": 0.3,
    "batch_sequences": 4, "skipped": False, "spike": True, "step_time_spread": 0.125, "slowest_rank": 1,
    "dispatch_slow_bytes": 100, "dispatch_fast_bytes": 200, "data_shares": {"math": 0.75, "code/web": 0.25},
    "data_task_shares": {"math": 1.0}, "data_epochs": {"math": 0.5}, "unheard": 3,
}
LAYERS = ["layer_01", "layer_02", "mtp_1", "mtp_2"]


def test_every_number_of_a_step_has_its_name():
    assert step_values(RECORD, LAYERS) == {
        "step": 7, "data/tokens": 448, "data/samples": 28, "loss/total": 7.5, "loss/main": 5.5, "loss/mtp_1": 5.25,
        "loss/mtp_2": 5.75, "loss/balance": 2.0, "schedule/lr": 1e-3, "optim/grad_norm": 1.5, "speed/step_time": 0.25,
        "speed/tokens_per_second": 256.0, "speed/mfu": 0.5, "moe/max_violation": 1.0, "schedule/bias_speed": 0.001,
        "schedule/mtp_weight": 0.3, "schedule/batch_sequences": 4, "optim/skipped": 0, "optim/spike": 1,
        "speed/step_time_spread": 0.125, "speed/slowest_rank": 1, "speed/dispatch_slow_bytes": 100,
        "speed/dispatch_fast_bytes": 200, "data/shares/math": 0.75, "data/shares/code/web": 0.25,
        "data/task_shares/math": 1.0, "data/epochs/math": 0.5, "other/unheard": 3,
        # means are 4, the loads over them: 1 1 1 1 and 2 1.5 0.5 0 and 1.25 0.75 1 1; the last layer saw no token
        "moe/min_load": 0.0, "moe/starving_experts": 1, "moe_layers/max_violation/layer_01": 0.0,
        "moe_layers/max_violation/layer_02": 1.0, "moe_layers/max_violation/mtp_1": 0.25,
    }


def test_metrics_of_the_contract_have_names_and_groups_and_no_name_is_given_twice():
    assert set(CONTRACT) - {STEP, "moe_load"} <= set(NAMES)
    assert {name.split("/")[0] for name in NAMES.values()} == GROUPS
    assert len(set(NAMES.values())) == len(NAMES)


@pytest.mark.parametrize("hole", [float("nan"), float("inf"), None, "text"])
def test_what_is_no_finite_number_is_a_gap(hole):
    record = RECORD | {"loss": hole, "loss_mtp": [1.0, hole], "data_shares": {"a": hole}, "skipped": True}
    values = step_values(record, LAYERS)
    assert not {"loss/total", "loss/mtp_2", "data/shares/a"} & set(values)
    assert values["loss/mtp_1"] == 1.0 and values["optim/skipped"] == 1
    assert values == json.loads(json.dumps(values, allow_nan=False))


def test_evaluations_of_a_part_and_of_the_whole_text_are_different_series():
    record = {
        "step": 9, "tokens": 5, "loss": 4.5, "loss_mtp": [4.75], "bits_per_byte": None, "heldout_tokens": 64,
        "whole": False,
    }
    assert eval_values(record) == {"step": 9, "eval/loss": 4.5, "eval/loss_mtp_1": 4.75, "eval/heldout_tokens": 64}
    whole = eval_values(record | {"whole": True, "bits_per_byte": 1.5})
    assert whole == {
        "step": 9, "eval/whole/loss": 4.5, "eval/whole/loss_mtp_1": 4.75, "eval/whole/heldout_tokens": 64,
        "eval/whole/bits_per_byte": 1.5,
    }


def test_layers_are_named_as_in_the_model():
    model = train_model()
    assert (model.first_k_dense_replace, model.num_hidden_layers, model.num_nextn_predict_layers) == (1, 3, 2)
    assert layer_names(model) == ["layer_01", "layer_02", "mtp_1", "mtp_2"]


def test_the_histogram_is_numpys():
    draw = random.Random(5)
    loads = [[draw.randint(0, 900) for _ in range(64)] for _ in range(7)]
    counts, edges = load_histogram([*loads, [0] * 64])
    relative = np.concatenate([np.array(load) / np.mean(load) for load in loads])
    expected, expected_edges = np.histogram(relative, bins=64, range=(0, relative.max()))
    assert counts == expected.tolist() and sum(counts) == 7 * 64
    np.testing.assert_allclose(edges, expected_edges, rtol=1e-12)
    assert load_histogram([[3, 3, 3]])[0][-1] == 3
    assert load_histogram([]) is None and load_histogram([[0, 0]]) is None
