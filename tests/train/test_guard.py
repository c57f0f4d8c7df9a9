"""A spike of the loss is skipped or rolled back exactly: in FP64 the run equals one led around the bad data."""

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch
from helpers import make_config, metrics, run, status

from dstrain.config.schema import GuardConfig
from dstrain.data.samples import SampleStream
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.precision.policy import PRECISIONS
from dstrain.train.ema import Ema
from dstrain.train.guard import is_spike, remember
from dstrain.train.state import RunState, build_state, initialise, run_tensors
from dstrain.train.step import Stepper

BAD = range(48, 52)  # the samples of step 13
KEYS = ("loss", "loss_main", "lr", "mtp_weight", "grad_norm", "tokens", "samples", "moe_load")
RATE = "[{until: 2e3, value: 2e-2, shape: linear}]"  # a function of the tokens that shows where they stand


def batch(self, first, count):
    """One sentence again and again, which is learnt fast, and random tokens in the bad samples."""
    width, good = 16 + 1 + 2, torch.arange(19) % 7 + 5
    rows = [torch.randint(0, 300, (width,), generator=torch.Generator().manual_seed(i)) if i in BAD else good
            for i in range(first, first + count)]
    return torch.stack(rows), torch.zeros(count, width, dtype=torch.int64)


@pytest.fixture(autouse=True)
def samples(monkeypatch):
    monkeypatch.setattr(SampleStream, "batch", batch)


def config_of(tmp_path, spikes, *more):
    return make_config(
        tmp_path, "precision=fp64", "optim.moments=fp32", "run.steps=20", "checkpoint.every=5", "checkpoint.keep=9",
        f"guard.spikes={spikes}", "guard.window=4", "guard.deviations=3", f"run.name={spikes}", "schedule.tokens=2e3",
        f"schedule.learning_rate={RATE}", "ema.decay=0.9", *more,
    )


def led_around(config, back_to, skipped=13):
    """Steps of a plain run, guard off: at step `skipped` back to what was after step `back_to`, on with its samples."""
    config = dataclasses.replace(config, guard=GuardConfig())
    precision, device = PRECISIONS["fp64"], torch.device("cpu")
    model, optimizer = build_state(config, precision, device)
    initialise(model, optimizer, config.run.seed)
    stream = type("Stream", (), {"batch": batch})()
    ema = Ema(model, optimizer, config.ema)
    ema.start()
    stepper, state, rows = Stepper(config, model, optimizer, LocalDispatcher(1), stream, ema=ema), RunState(), []
    for _ in range(back_to):
        rows.append(stepper.step(state))
    state.step, state.samples = skipped, 4 * skipped
    while state.step < 20:
        rows.append(stepper.step(state))
    return rows, run_tensors(model, optimizer, ema), state


def equal(config, rows, tensors, state, steps):
    from test_resume import final_tensors

    found = [row for row in metrics(config) if row["step"] in steps]
    expected = [row for row in rows if row["step"] in steps]
    assert [[row[key] for key in KEYS] for row in found] == [[row[key] for key in KEYS] for row in expected]
    stored = final_tensors(config, 20)
    assert all(torch.equal(stored[name], tensor.view(stored[name].shape)) for name, tensor in tensors.items())
    meta = (Path(config.run.dir) / config.run.name / "checkpoints/step-00000020/meta.json").read_text()
    for key in ("step", "samples", "tokens", "updates"):
        assert f'"{key}": {getattr(state, key)}' in meta
    assert f'"skipped": {20 - state.updates}' in meta


def test_a_spike_is_skipped(tmp_path):
    config = config_of(tmp_path, "skip")
    assert run(config) == 0
    for key in ("spike", "skipped"):
        assert [row["step"] for row in metrics(config) if row[key]] == [13]
    equal(config, *led_around(config, back_to=12), steps={*range(1, 13), *range(14, 21)})


def test_a_spike_rolls_back_to_the_checkpoint_and_the_samples_go_on(tmp_path, capsys):
    config = config_of(tmp_path, "rollback")
    assert run(config) == 0
    assert [row["step"] for row in metrics(config) if row["spike"]] == [13]
    equal(config, *led_around(config, back_to=10), steps={*range(1, 11), *range(14, 21)})
    out = capsys.readouterr().out
    assert "step 13: loss " in out and "back to the weights of step-00000010 and 640 tokens; samples go on at 52" in out


def test_an_interrupted_run_knows_the_losses_before(tmp_path):
    """Stopped just before the spike, which a window that began anew would not see."""
    whole = config_of(tmp_path, "skip", "run.name=whole")
    assert run(whole) == 0
    parts = config_of(tmp_path, "skip", "run.name=parts", "run.steps=12")
    assert run(parts) == 0 and run(dataclasses.replace(parts, run=dataclasses.replace(parts.run, steps=20))) == 0
    from test_resume import same_runs

    same_runs(whole, parts, 20)


def test_without_a_checkpoint_the_step_is_skipped_and_too_many_rollbacks_end_the_run(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, "rollback", "checkpoint.every=0", "run.name=none")
    assert run(config) == 0 and "there is no checkpoint yet" in capsys.readouterr().out
    rows, tensors, state = led_around(config, back_to=12)
    equal(config, rows, tensors, state, steps={*range(14, 21)})
    monkeypatch.setattr("test_guard.BAD", range(48, 4000))
    config = config_of(tmp_path, "rollback", "checkpoint.every=10", "guard.rollbacks=2", "run.name=often")
    assert run(config) == 1
    assert "at step 15, the 3. since step-00000010" in status(config)["reason"]


def test_what_a_spike_is():
    guard = GuardConfig("skip", window=5, deviations=4.0)
    recent = [3.0, 2.0, 2.5, 2.25, 2.125]
    deviation = statistics.median([0.75, 0.25, 0.25, 0.0, 0.125])  # from the median 2.25
    limit = 2.25 + 4 * 1.4826 * deviation
    assert is_spike(limit + 1e-9, recent, guard) and not is_spike(limit - 1e-9, recent, guard)
    assert not is_spike(9.0, recent[1:], guard) and not is_spike(9.0, recent, GuardConfig(window=5))
    flat = [2.0] * 5
    assert is_spike(2.0081, flat, guard) and not is_spike(2.0079, flat, guard)  # 4 times a thousandth of 2
    for loss in (1.0, 7.0):
        remember(loss, recent, guard)
    assert recent == [2.5, 2.25, 2.125, 1.0, 7.0]
    remember(0.0, recent, GuardConfig())
    assert recent == [2.5, 2.25, 2.125, 1.0, 7.0]
