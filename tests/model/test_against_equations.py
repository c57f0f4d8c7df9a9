"""Logits, losses, loads and every gradient against the float64 computation of the paper's equations in `oracle`."""

import pytest
import torch
from oracle import oracle, tiny_config
from small_models import ALPHA, GRID, MTP_WEIGHT, build, caught_logits, run, sample


@pytest.mark.parametrize("document_mask", [False, True], ids=["windows", "documents"])
@pytest.mark.parametrize("case", GRID)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
def test_losses_loads_and_gradients_equal_the_equations(case, document_mask, dtype, tolerance):
    config = tiny_config(**GRID[case])
    model, weights = build(config, dtype)
    tokens, documents = sample(config)
    expected = oracle(
        config, weights, tokens, documents, document_mask=document_mask, balance_alpha=ALPHA, mtp_weight=MTP_WEIGHT
    )
    expected.loss.backward()
    sums, counts = run(model, config, tokens, documents, document_mask)

    close = {"rtol": tolerance, "atol": tolerance}
    mine = sums.depths / torch.tensor(counts)
    torch.testing.assert_close(mine, torch.stack([expected.loss_main, *expected.loss_mtp]).detach(), **close)
    torch.testing.assert_close(sums.balance / len(tokens), expected.loss_balance.detach(), **close)
    assert [router.load.tolist() for router in model.routers] == [load.tolist() for load in expected.loads]
    for name, parameter in model.named_parameters():
        scale = weights[name].grad.abs().max()
        torch.testing.assert_close(
            parameter.main_grad.double() / scale, weights[name].grad / scale, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("case", GRID)
def test_logits_of_every_depth_equal_the_equations(case):
    config = tiny_config(**GRID[case])
    model, weights = build(config, torch.float64)
    tokens, documents = sample(config)
    expected = oracle(config, weights, tokens, documents, balance_alpha=ALPHA, mtp_weight=MTP_WEIGHT)
    with caught_logits() as caught:
        run(model, config, tokens, documents, document_mask=False)
    assert len(caught) == 1 + config.num_nextn_predict_layers
    for mine, theirs in zip(caught, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs.detach().flatten(0, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("count", [1, 4], ids=["accumulate-1", "accumulate-4"])
def test_recomputation_gives_the_same_bits_and_counts_every_token_once(count):
    """FAULTS A07: sum of the load = tokens · top-k, with recomputation or without, in one micro-batch or four."""
    config = tiny_config()
    tokens, documents = sample(config, sequences=4)
    grads, loads = [], []
    for recompute in (False, True):
        model, _ = build(config, torch.float32)
        for part in range(count):
            rows = slice(part * 4 // count, (part + 1) * 4 // count)
            run(model, config, tokens[rows], documents[rows], False, recompute)
        grads.append([parameter.main_grad for parameter in model.parameters()])
        loads.append([router.load.tolist() for router in model.routers])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert loads[0] == loads[1]
    assert all(sum(load) == 4 * 16 * config.num_experts_per_tok for load in loads[0])
