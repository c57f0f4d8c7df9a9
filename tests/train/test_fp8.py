"""precision=fp8 in whole steps: never a stale weight, the guard sees what is not finite, recomputation changes nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import RandomStream, make_config, metrics, run

from dstrain.cli import main
from dstrain.config.errors import InputError
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.precision import fp8_linear
from dstrain.precision.policy import resolve_precision
from dstrain.train.evaluation import evaluate_heldout
from dstrain.train.state import RunState, build_state, initialise
from dstrain.train.step import Stepper

CPU = torch.device("cpu")


def make(tmp_path, *overrides):
    config = make_config(tmp_path, "precision=fp8", *overrides)
    chosen = resolve_precision("fp8", CPU, config.precision.backend, config.precision.scales)
    model, optimizer = build_state(config, chosen, CPU)
    initialise(model, optimizer, seed=1)
    return config, model, optimizer, Stepper(config, model, optimizer, LocalDispatcher(8), RandomStream(config, config.model.vocab_size))


def test_every_linear_of_attention_and_ffn_is_fp8_and_nothing_else(tmp_path):
    _, model, _, _ = make(tmp_path)
    ours = {name for name, module in model.named_modules() if getattr(module, "fp8", None) is not None and hasattr(module, "weight")}
    kinds = {name.split(".")[-1] for name in ours}
    assert kinds == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    matrices = {name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim > 1}
    others = {name.split(".")[-1] for name in matrices - ours}
    assert others == {"embed_tokens", "lm_head", "gate", "eh_proj"}


class Windows(RandomStream):
    def __len__(self):
        return 8


def losses_with_changes(tmp_path):
    """Losses of three steps of four micro-batches, of an evaluation between them, and after a load of older weights."""
    config, model, optimizer, stepper = make(tmp_path, "batch.micro_sequences=1")
    state, record = RunState(), []
    windows = Windows(config, config.model.vocab_size)
    older = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def note_step():
        result = stepper.step(state)
        record.extend((result["loss"], result["grad_norm"]))

    def note_evaluation():
        args = config, stepper.executor_of(state), stepper.mesh, windows, np.ones(config.model.vocab_size), 4
        record.append(evaluate_heldout(*args, step=state.step)["loss"])

    note_step(), note_evaluation(), note_step(), note_evaluation()
    model.load_state_dict(older)
    note_evaluation()
    for name, parameter in optimizer.states.items():
        optimizer.set_weight(name, older[name])
    note_evaluation(), note_step()
    return record


def test_quantised_weights_are_never_stale(tmp_path, monkeypatch):
    """FAULTS B10: the right losses are those with weights quantised at every use."""
    cached = losses_with_changes(tmp_path)
    quantized = []
    original = fp8_linear.kept_weight

    def fresh(weight, backend):
        quantized.append(weight)
        weight.fp8_state = None
        return original(weight, backend)

    monkeypatch.setattr(fp8_linear, "kept_weight", fresh)
    assert losses_with_changes(tmp_path) == cached
    assert len(set(cached)) > len(cached) - 3 and len(quantized) > 1000


def test_weights_are_quantised_once_a_step_whatever_the_number_of_micro_batches(tmp_path, monkeypatch):
    _, model, _, stepper = make(tmp_path, "batch.micro_sequences=1")
    calls, fp8 = [], model.layers[0].fp8
    original = fp8.quantize_weight
    monkeypatch.setattr(fp8, "quantize_weight", lambda weight: calls.append(1) or original(weight))
    state = RunState()
    for step in (1, 2):
        stepper.step(state)
        linears = sum(hasattr(module, "weight") and getattr(module, "fp8", None) is not None for module in model.modules())
        assert len(calls) == step * linears


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_activation_ends_as_a_skipped_step(tmp_path, bad):
    _, model, optimizer, stepper = make(tmp_path)
    with torch.no_grad():  # one number of one row of the dense layer's FFN
        model.layers[0].mlp.up_proj.weight[3, 5] = bad
    before = {name: state.parameter.clone() for name, state in optimizer.states.items()}
    result = stepper.step(RunState())
    assert result["skipped"] and not np.isfinite(result["loss"])
    for name, state in optimizer.states.items():
        assert torch.equal(state.parameter.view(torch.uint8), before[name].view(torch.uint8))


def test_recomputing_blocks_changes_no_bit(tmp_path):
    results = []
    for recompute in ("none", "block"):
        _, _, optimizer, stepper = make(tmp_path, f"parallel.recompute={recompute}", "batch.micro_sequences=2")
        state = RunState()
        rows = [stepper.step(state) for _ in range(3)]
        results.append(([(row["loss"], row["grad_norm"], row["moe_load"]) for row in rows], [s.master for s in optimizer.states.values()]))
    assert results[0][0] == results[1][0] and all(map(torch.equal, results[0][1], results[1][1]))


def test_fp32_scales_are_another_run_and_both_stay_near_bf16(tmp_path):
    losses = {}
    for name, overrides in {"bf16": ["precision=bf16"], "two": [], "fp32": ["precision.scales=fp32"]}.items():
        config = make_config(tmp_path, *(["precision=fp8"] if name != "bf16" else []), *overrides, f"run.name={name}", "run.steps=8")
        assert run(config) == 0
        losses[name] = torch.tensor([row["loss_main"] for row in metrics(config)])
    assert (losses["two"] != losses["fp32"]).any() and (losses["two"] != losses["bf16"]).any()
    for name in ("two", "fp32"):
        assert ((losses[name] / losses["bf16"] - 1).abs() < 0.01).all()


def test_the_log_says_the_backend_and_an_fp8_checkpoint_generates_in_fp8_and_bf16(tmp_path, capfd):
    config = make_config(tmp_path, "precision=fp8", "run.steps=4", "eval.at_end=true")
    assert run(config) == 0
    out, err = capfd.readouterr()
    assert "precision fp8, backend emulated, scales power_of_two" in out + err
    texts = {}
    for precision in ("fp8", "bf16", "fp32"):
        code = main(["generate", f"checkpoint={config.run.dir}/run", f"precision={precision}", "prompt=def", "max_tokens=8", "temperature=0"])
        texts[precision] = capfd.readouterr()[0]
        assert code == 0 and texts[precision].endswith("\n")


def test_auto_is_never_fp8_and_a_missing_backend_is_named(tmp_path, capfd):
    assert resolve_precision("auto", CPU).fp8 is None
    config = make_config(tmp_path, "precision=fp8")
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, backend="cublas"))
    with pytest.raises(InputError, match="precision.backend='cublas': valid are auto, emulated"):
        run(config)
