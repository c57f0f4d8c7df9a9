"""Gradient accumulation does not change the run: the right values are those of one micro-batch."""

import dataclasses

import pytest
import torch
from helpers import RandomStream, make_config

from dstrain.config.schema import BatchRamp
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.precision.policy import PRECISIONS
from dstrain.train.state import RunState, build_state, initialise
from dstrain.train.step import Stepper


def record_run(config, precision="fp64", steps=6):
    """Per step: unclipped gradients, metrics, weights, biases."""
    chosen = PRECISIONS[precision]
    model, optimizer = build_state(config, chosen, torch.device("cpu"))
    initialise(model, optimizer, seed=1)
    stepper = Stepper(config, model, optimizer, LocalDispatcher(), RandomStream(config, config.model.vocab_size))
    grads = []
    norm = optimizer.grad_norm
    optimizer.grad_norm = lambda: (
        grads.append({n: s.parameter.main_grad.clone() for n, s in optimizer.states.items()}), norm()
    )[1]
    state, history = RunState(), []
    for _ in range(steps):
        before = {name: s.master.clone() for name, s in optimizer.states.items()}
        metrics = stepper.step(state)
        change = {name: s.master - before[name] for name, s in optimizer.states.items()}
        biases = [router.e_score_correction_bias.clone() for router in model.routers]
        history.append((grads[-1], metrics, change, biases))
    return history


@pytest.mark.parametrize("document_mask", [False, True], ids=["windows", "documents"])
@pytest.mark.parametrize("micro", [2, 1])
def test_accumulation_equals_one_micro_batch_for_six_steps_in_fp64(tmp_path, micro, document_mask):
    config = make_config(tmp_path, f"data.document_mask={str(document_mask).lower()}", "optim.moments=fp32")
    whole = record_run(config)
    parts = record_run(dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro_sequences=micro)))
    assert whole[0][1]["lr"] == 1e-3 and whole[0][1]["bias_speed"] == 0.01
    for (grad_a, a, change_a, bias_a), (grad_b, b, change_b, bias_b) in zip(whole, parts, strict=True):
        for name in grad_a:
            scale = grad_a[name].abs().max().clamp_min(1e-30)
            assert (grad_a[name] - grad_b[name]).abs().max() / scale < 1e-9, name
            assert (change_a[name] - change_b[name]).norm() <= 1e-7 * change_a[name].norm(), name
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-9 * a["grad_norm"]
        for key in ("loss", "loss_main", "loss_balance"):
            assert abs(a[key] - b[key]) < 1e-12 * abs(a[key]), key
        assert a["moe_load"] == b["moe_load"]
        assert all(torch.equal(x, y) for x, y in zip(bias_a, bias_b))
    assert all(bias.abs().max() > 0 for bias in whole[-1][3])


def test_a_token_weighs_the_same_in_sparse_and_dense_micro_batches():
    """FAULTS A01: micro-batches with 1 valid token of loss 4 and 3 of loss 0 -> loss 1.0, not the mean of means 2.0."""
    from dstrain.model.loss import LossWeights

    weights = LossWeights.of_batch([1 + 3], sequences=2, mtp_weight=0.0, depth_weights=[], alpha=0.0)
    assert weights.depths[0] * (4.0 + 0.0) == 1.0


@pytest.mark.parametrize("sequences, length", [(2, 16), (4, 16), (2, 32)])
def test_mtp_loss_is_a_mean_over_its_own_tokens(sequences, length):
    """FAULTS A16: a constant loss of 2 per token gives 2 · lambda, whatever the batch and the sequence length."""
    from dstrain.model.batch import MicroBatch
    from dstrain.model.loss import LossWeights

    tokens = torch.zeros(sequences, length + 2, dtype=torch.int64)
    documents = torch.arange(length + 2).div(5, rounding_mode="floor").expand(sequences, -1)
    batch = MicroBatch(tokens, documents, depth=1, document_mask=True)
    counts = batch.valid_counts().tolist()
    assert counts[1] < counts[0] < sequences * length
    weights = LossWeights.of_batch(counts, sequences, mtp_weight=0.3, depth_weights=[1.0], alpha=0.0)
    assert weights.depths[1] * 2.0 * counts[1] == pytest.approx(0.3 * 2.0, rel=1e-15)


def test_batch_ramp_grows_by_its_multiple_and_accumulates_more_micro_batches(tmp_path):
    config = make_config(tmp_path)
    ramp = BatchRamp(start=2, until=16 * 20, multiple=2)
    config = dataclasses.replace(config, batch=dataclasses.replace(config.batch, sequences=8, micro_sequences=2, ramp=ramp))
    sizes = [metrics["batch_sequences"] for _, metrics, _, _ in record_run(config, steps=8)]
    # tokens before each step: 0, 32, 64, 96, 128, 192, 256, 352 -> 2 + 6 · tokens / 320, rounded down to a multiple of 2
    assert sizes == [2, 2, 2, 2, 4, 4, 6, 8]
