"""AdamW against torch's own, who is decayed, and the guard."""

from contextlib import nullcontext

import pytest
import torch
from helpers import RandomStream, compiled_kernels, make_config, metrics, run, status, train_model

from dstrain.config.schema import OptimConfig
from dstrain.model.model import Model
from dstrain.model.router import Router
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.precision.main_grad import attach_main_grads
from dstrain.precision.policy import PRECISIONS
from dstrain.train.bias import update_bias
from dstrain.train.optimizer import CHUNK, AdamW
from dstrain.train.state import RunState, initialise, run_tensors
from dstrain.train.step import Stepper


def make_optimizer(precision="fp64", **optim):
    chosen = PRECISIONS[precision]
    model = Model(train_model(), chosen.compute)
    attach_main_grads(model, chosen.main)
    optimizer = AdamW(model, OptimConfig(**{"moments": "fp32", **optim}), chosen)
    initialise(model, optimizer, seed=1)
    return model, optimizer


@pytest.mark.parametrize("chunk", [1 << 17, 37], ids=["whole", "chunks"])
def test_ten_updates_equal_torch_adamw(chunk, monkeypatch):
    monkeypatch.setitem(CHUNK, "cpu", chunk)
    model, optimizer = make_optimizer()
    copies = {name: torch.nn.Parameter(s.parameter.detach().clone()) for name, s in optimizer.states.items()}
    groups = [
        {"params": [copies[n] for n, s in optimizer.states.items() if s.decay], "weight_decay": 0.1},
        {"params": [copies[n] for n, s in optimizer.states.items() if not s.decay], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for update in range(1, 11):
        for name, state in optimizer.states.items():
            state.parameter.main_grad.normal_(generator=torch.Generator().manual_seed(update))
            copies[name].grad = state.parameter.main_grad * 0.5
        optimizer.step(1e-2, update, grad_scale=0.5)
        reference.step()
    for name, state in optimizer.states.items():
        torch.testing.assert_close(state.parameter.detach(), copies[name].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_the_compiled_update_equals_the_eager_one():
    """In BF16 with BF16 moments, for sizes below, at and above a vector; to the rounding of FP32."""
    results = []
    for kernels in (nullcontext(), compiled_kernels()):
        with kernels:
            _, optimizer = make_optimizer("bf16", moments="bf16")
            for update in range(1, 4):
                for state in optimizer.states.values():
                    state.parameter.main_grad.normal_(generator=torch.Generator().manual_seed(update))
                optimizer.step(1e-2, update, grad_scale=0.5)
        assert all(not state.parameter.main_grad.any() for state in optimizer.states.values())
        results.append({name: state.master for name, state in optimizer.states.items()})
    for name, master in results[0].items():
        torch.testing.assert_close(results[1][name], master, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_grad_norm_is_the_norm_of_all_gradients_together():
    """Against one float64 norm; a parameter longer than a row, with a rest, is among them."""
    from dstrain.train.optimizer import ROW

    _, optimizer = make_optimizer("fp32")
    grads = [state.parameter.main_grad for state in optimizer.states.values()]
    for seed, grad in enumerate(grads):
        grad.normal_(generator=torch.Generator().manual_seed(seed))
    assert any(grad.numel() > ROW and grad.numel() % ROW for grad in grads)
    expected = torch.cat([grad.double().flatten() for grad in grads]).norm()
    torch.testing.assert_close(optimizer.grad_norm(), expected, rtol=1e-6, atol=0)


def test_every_parameter_is_in_the_optimizer_once_and_only_matrices_decay():
    """FAULTS C11."""
    model, optimizer = make_optimizer()
    assert sorted(optimizer.states) == sorted(name for name, _ in model.named_parameters())
    not_decayed = {name for name, state in optimizer.states.items() if not state.decay}
    assert not_decayed == {name for name in optimizer.states if name.endswith("norm.weight")}
    assert not any("bias" in name for name in optimizer.states)


def test_bf16_weights_are_the_rounded_masters_and_small_updates_add_up():
    """A hundred updates of 1e-4 on a weight of 1.0 reach 0.99 in the master; BF16 alone would stay at 1.0."""
    _, optimizer = make_optimizer("bf16", weight_decay=0.0)
    state = optimizer.states["lm_head.weight"]
    optimizer.set_weight("lm_head.weight", torch.ones(state.master.shape))
    for update in range(1, 101):
        state.parameter.main_grad.fill_(1.0)
        optimizer.step(1e-4, update, grad_scale=1.0)
    torch.testing.assert_close(state.master[0].item(), 0.99, rtol=1e-4, atol=0)
    assert torch.equal(state.parameter.detach().view(-1), state.master.to(torch.bfloat16))


def test_routing_bias_moves_by_its_speed_against_the_load_and_stays_fp32():
    """FAULTS A05: 0.5 after 1000 updates of +0.001 is 1.5; BF16 would stay at 0.5. Cast and moved modules keep FP32."""
    router = Router(train_model(), torch.bfloat16).to(torch.bfloat16)
    assert router.e_score_correction_bias.dtype == torch.float32
    router.e_score_correction_bias.fill_(0.5)
    load = torch.tensor([0, 8, 1, 1, 1, 1, 1, 3])  # mean 2
    for _ in range(1000):
        update_bias(router, load, 0.001)
    expected = 0.5 + torch.tensor([1.0, -1, 1, 1, 1, 1, 1, -1])
    torch.testing.assert_close(router.e_score_correction_bias, expected, rtol=1e-4, atol=0)
    load.fill_(2)
    before = router.e_score_correction_bias.clone()
    update_bias(router, load, 0.001)
    assert torch.equal(before, router.e_score_correction_bias)


def test_casting_a_whole_model_keeps_the_bits_of_the_routing_bias():
    model = Model(train_model(), torch.float32)
    model.routers[0].e_score_correction_bias.fill_(0.50123)
    before = model.routers[0].e_score_correction_bias.clone()
    assert torch.equal(model.to(torch.bfloat16).routers[0].e_score_correction_bias, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_skips_the_step_and_nothing_moves(tmp_path, value):
    """FAULTS C09 on one rank: samples and the step's number are consumed, everything else stands still."""
    config = make_config(tmp_path)
    model, optimizer = make_optimizer("fp32")
    stepper = Stepper(config, model, optimizer, LocalDispatcher(), RandomStream(config, config.model.vocab_size))
    state = RunState()
    stepper.step(state)
    before = {name: tensor.clone() for name, tensor in run_tensors(model, optimizer).items()}
    tokens = state.tokens
    norm = optimizer.grad_norm
    name = "model.norm.weight"
    optimizer.grad_norm = lambda: (optimizer.states[name].parameter.main_grad.view(-1)[0].fill_(value), norm())[1]
    metrics = stepper.step(state)
    assert metrics["skipped"] and (state.step, state.samples, state.tokens, state.updates) == (2, 8, tokens, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run_tensors(model, optimizer).items())
    optimizer.grad_norm = norm
    assert not stepper.step(state)["skipped"] and state.updates == 2 and state.skipped_in_a_row == 0
    assert all(router.load.sum() == 0 for router in model.routers)


def test_too_many_skipped_steps_in_a_row_end_the_run_with_a_reason(tmp_path, monkeypatch, capsys):
    config = make_config(tmp_path, "optim.max_skipped_steps=3", "run.steps=20")
    monkeypatch.setattr(AdamW, "grad_norm", lambda self: torch.tensor(float("nan")))
    assert run(config) == 1
    assert "3 steps in a row" in capsys.readouterr().err
    assert status(config)["status"] == "failed" and status(config)["step"] == 3
    rows = metrics(config)
    assert [row["skipped"] for row in rows] == [True] * 3 and rows[-1]["grad_norm"] is None
    assert not list((tmp_path / "runs/run/checkpoints").glob("step-*"))
