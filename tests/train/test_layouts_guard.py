"""What a layout does with bad gradients and empty experts, and what a rank holds; one process has the right values."""

import gc
import math

import torch
from helpers import train_model
from ranks import spawn
from recorded import Recorder, assert_same_run
from test_layouts import config_of

from dstrain.model.model import Model

LAYOUTS = {
    "dp 4": {},
    "ep 4": {"ep": 4},
    "dualpipe pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "dualpipe"},
}
MODEL = train_model(num_hidden_layers=3, num_nextn_predict_layers=1)


def spoil_one_step(recorder, rank):
    """Three steps; in the second, one rank finds a NaN in a gradient of its own. -> the others, and its metrics."""
    optimizer, state, ready = recorder.optimizer, recorder.state, recorder.optimizer.ready
    first = recorder.steps(1)

    def spoilt(names):
        if names and optimizer.ready is spoilt:
            optimizer.ready = ready
            optimizer.states[names[0]].parameter.main_grad.view(-1)[-1] = math.nan
        ready(names)

    def everything():
        moments = [t for s in optimizer.states.values() for t in (s.master, s.exp_avg, s.exp_avg_sq)]
        return [tensor.clone() for tensor in [*recorder.model.state_dict().values(), *moments]]

    before, tokens = everything(), state.tokens
    if rank == recorder.layout.mesh.world_size - 1:
        optimizer.ready = spoilt
    ((_, metrics, *_),) = recorder.steps(1)
    assert optimizer.ready == ready
    assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))
    assert metrics["skipped"] and math.isnan(metrics["grad_norm"]) and math.isfinite(metrics["loss"])
    assert (state.step, state.samples, state.tokens, state.updates) == (2, 16, tokens, 1)
    assert (state.skipped, state.skipped_in_a_row) == (1, 1)
    assert not any(parameter.main_grad.any() for parameter in recorder.model.parameters())
    last = recorder.steps(1)
    assert state.skipped_in_a_row == 0
    return first + last


def force_experts(recorder):
    """Two steps in which every token goes to experts 0 to 3: of rank 0 with ep 2, of ranks 0 and 1 with ep 4."""
    for router in recorder.model.routers:
        router.e_score_correction_bias[4:] = -100.0
    return recorder.steps(2)


def run_all(rank, size, configs, memory_configs):
    found = {case: held(Recorder(config, "bf16", size, rank)) for case, config in memory_configs.items()}
    for case, config in configs.items():
        found["NaN", case] = spoil_one_step(Recorder(config, "fp64", size, rank), rank)
        found["forced", case] = force_experts(Recorder(config, "fp64", size, rank))
    return found


def test_ranks_agree_on_bad_gradients_and_empty_experts_and_hold_their_part(tmp_path):
    configs = {case: config_of(tmp_path, model=MODEL, **parallel) for case, parallel in LAYOUTS.items()}
    results = spawn(run_all, 4, configs, memory_configs(tmp_path), timeout=300)
    single = config_of(tmp_path, model=MODEL)
    # FAULTS C09: one rank's NaN skips the step on all, and training goes on as if the step had not been.
    reference = spoil_one_step(Recorder(single), 0)
    for case in configs:
        print("NaN", case)
        assert_same_run([result["NaN", case] for result in results], reference)
    # FAULTS B12: ranks without a token take part in everything; their experts' gradients are zeros.
    reference = force_experts(Recorder(single))
    for case in configs:
        print("forced", case)
        histories = [result["forced", case] for result in results]
        assert_same_run(histories, reference)
        for grads, metrics, *_ in histories[-1]:
            assert not any(load for layer in metrics["moe_load"] for load in layer[4:])
            idle = [values for name, (_, values) in grads.items() if ".mlp.experts." in name]
            assert idle or case == "dp 4"
            assert case == "dp 4" or not any(values.any() for values in idle)
    check_memory(results)


# Memory ------------------------------------------------------------------------------------------------------------

# Units: embed, blocks 0 to 2, head, one MTP module (layer 3), which needs the embedding again.
STAGES = {
    0: {"layers": {0, 1}, "ends": {"embed_tokens"}},
    1: {"layers": {2, 3}, "ends": {"embed_tokens", "norm", "lm_head"}},
}
LARGE = train_model(
    num_hidden_layers=3, num_nextn_predict_layers=1, hidden_size=64, intermediate_size=128, moe_intermediate_size=64
)
MEMORY = {
    "dp 1": None,
    "dp 4": {},
    "ep 4": {"ep": 4},
    "1f1b pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "1f1b", "stages": [3, 3]},
    "dualpipe pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "dualpipe"},
}


def memory_configs(tmp_path):
    return {case: config_of(tmp_path, "optim.moments=bf16", model=LARGE, **parallel)
            for case, parallel in MEMORY.items() if parallel is not None}


def all_bytes():
    """Of every tensor that Python knows in this process, each storage once."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held(recorder):
    """Bytes that a rank holds between steps: by kind, and all that is freed with the run's state."""
    recorder.steps(1)
    recorder.grads = None
    optimizer = recorder.optimizer
    kinds = {
        "weights": [p for p in recorder.model.parameters()],
        "gradients": [p.main_grad for p in recorder.model.parameters()],
        "masters": [s.master for s in optimizer.states.values() if s.has_master],
        "moments": [t for s in optimizer.states.values() for t in (s.exp_avg, s.exp_avg_sq)],
    }
    nbytes = {kind: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
              for kind, tensors in kinds.items()}
    del kinds
    before = all_bytes()
    recorder.__dict__.clear()
    del optimizer
    return nbytes | {"all": before - all_bytes()}


def formula(rank, case):
    """FP32 gradients, BF16 moments, FP32 masters of BF16 weights (the gate's weight is FP32 and needs none).

    DualPipe holds every stage on both pipeline ranks.
    """
    parallel = MEMORY[case] or {}
    pp, ep, ranks = parallel.get("pp", 1), parallel.get("ep", 1), 1 if MEMORY[case] is None else 4
    sizes = dict.fromkeys(("weights", "gradients", "masters", "moments"), 0.0)
    with torch.device("meta"):
        whole = Model(LARGE, torch.bfloat16)
    for name, parameter in whole.named_parameters():
        numel, holders = parameter.numel(), ranks
        if case.startswith("1f1b"):
            stage = STAGES[rank // 2]
            layer = int(name.split(".")[2]) if ".layers." in name else None
            if layer is not None and layer not in stage["layers"]:
                continue
            if layer is None and name.split(".")[-2] not in stage["ends"]:
                continue
            holders = 4 if "embed_tokens" in name else 2
        if ".mlp.experts." in name:
            numel, holders = numel / ep, holders / ep
        sizes["weights"] += numel * parameter.itemsize
        sizes["gradients"] += 4 * numel
        sizes["masters"] += 4 * numel / holders * (parameter.dtype == torch.bfloat16)
        sizes["moments"] += 2 * 2 * numel / holders
    return sizes


def check_memory(results):
    """Within 4 % of the formula (buckets are filled up), and nothing else is held beside these."""
    totals = {}
    for case in MEMORY:
        for rank in range(4):
            expected = formula(rank, case)
            totals[case] = max(totals.get(case, 0), sum(expected.values()))
            if MEMORY[case] is None:
                continue
            found = results[rank][case]
            for kind, nbytes in expected.items():
                assert nbytes <= found[kind] <= 1.04 * nbytes, (case, rank, kind)
            parts = sum(found[kind] for kind in expected)
            assert parts <= found["all"] <= 1.02 * parts, (case, rank)
    assert totals["ep 4"] < 0.65 * totals["dp 4"] and totals["dp 4"] < 0.7 * totals["dp 1"]
