"""What the records of `metrics.jsonl` and `eval.jsonl` are called in W&B: `<group>/<name>`, a section a group there.

A list becomes one series an entry, counted from 1 (`loss/mtp_1`), a dict one a key (`data/shares/math`). Numbers that
are not finite are left out: a gap in the curve, where `optim/skipped` says why. A key that has no name here goes under
`other/`.
"""

import math

from dstrain.config.schema import ModelConfig

STEP = "step"  # the axis of every series
NAMES = {
    "tokens": "data/tokens",
    "samples": "data/samples",
    "data_shares": "data/shares",
    "data_task_shares": "data/task_shares",
    "data_epochs": "data/epochs",
    "loss": "loss/total",
    "loss_main": "loss/main",
    "loss_mtp": "loss/mtp",
    "loss_balance": "loss/balance",
    "grad_norm": "optim/grad_norm",
    "skipped": "optim/skipped",
    "spike": "optim/spike",
    "lr": "schedule/lr",
    "bias_speed": "schedule/bias_speed",
    "mtp_weight": "schedule/mtp_weight",
    "batch_sequences": "schedule/batch_sequences",
    "step_time": "speed/step_time",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu": "speed/mfu",
    "step_time_spread": "speed/step_time_spread",
    "slowest_rank": "speed/slowest_rank",
    "dispatch_slow_bytes": "speed/dispatch_slow_bytes",
    "dispatch_fast_bytes": "speed/dispatch_fast_bytes",
    "moe_max_violation": "moe/max_violation",
}
# Made of moe_load, which has a number for every expert.
MIN_LOAD = "moe/min_load"  # of the least loaded expert of all layers, over its layer's mean
STARVING = "moe/starving_experts"  # how many have less than a tenth of their layer's mean
OF_LAYER = "moe_layers/max_violation"  # one series a layer
LOAD = "moe/load"  # now and then, the histogram of all experts' loads over their layers' means

BINS = 64  # of the histogram


def layer_names(model: ModelConfig) -> list[str]:
    """Of the entries of `moe_load`: the MoE layers as they are numbered in the model, then the MTP blocks."""
    layers = range(model.first_k_dense_replace, model.num_hidden_layers)
    return [f"layer_{layer:02}" for layer in layers] + [
        f"mtp_{depth}" for depth in range(1, model.num_nextn_predict_layers + 1)
    ]


def step_values(record: dict, layers: list[str]) -> dict[str, float]:
    """The series' values of a step: an object of metrics.jsonl, with `layer_names`."""
    values = {STEP: record[STEP]}
    for key, value in record.items():
        if key not in (STEP, "moe_load"):
            values |= _numbers(NAMES.get(key, f"other/{key}"), value)
    relative = relative_loads(record.get("moe_load", []))
    loads = [load for layer in relative for load in layer]
    if loads:
        values |= {MIN_LOAD: min(loads), STARVING: sum(load < 0.1 for load in loads)}
        values |= {f"{OF_LAYER}/{name}": max(layer) - 1 for name, layer in zip(layers, relative) if layer}
    return values


def eval_values(record: dict) -> dict[str, float]:
    """The same of an object of eval.jsonl: under `eval/`, or `eval/whole/` where it is of the whole held-out text."""
    group = "eval/whole" if record["whole"] else "eval"
    values = {STEP: record[STEP]}
    for key, value in record.items():
        if key not in (STEP, "tokens", "whole"):
            values |= _numbers(f"{group}/{key}", value)
    return values


def relative_loads(moe_load: list[list[int]]) -> list[list[float]]:
    """Every expert's load over its layer's mean, 1.0 in perfect balance; an empty list for a layer without tokens."""
    return [[load * len(layer) / total for load in layer] if (total := sum(layer)) else [] for layer in moe_load]


def load_histogram(moe_load: list[list[int]]) -> tuple[list[int], list[float]] | None:
    """Counts [BINS] of experts and the bins' edges [BINS + 1], from 0 to the largest load over its layer's mean."""
    loads = [load for layer in relative_loads(moe_load) for load in layer]
    if not loads:
        return None
    width, counts = max(loads) / BINS, [0] * BINS
    for load in loads:
        counts[min(int(load / width), BINS - 1)] += 1
    return counts, [width * i for i in range(BINS + 1)]


def _numbers(name: str, value) -> dict[str, float]:
    """The finite numbers in `value`, each under a name of its own."""
    if isinstance(value, bool | int | float):
        return {name: value + 0} if math.isfinite(value) else {}
    found = {}
    if isinstance(value, dict):
        for key, item in value.items():
            found |= _numbers(f"{name}/{key}", item)
    elif isinstance(value, list):
        for number, item in enumerate(value, start=1):
            found |= _numbers(f"{name}_{number}", item)
    return found
