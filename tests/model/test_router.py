"""Routing cases worked out by hand (REFERENCE §1, FAULTS B06, A10) and the balance loss against autograd."""

import numpy as np
import pytest
import torch
from oracle import tiny_config
from small_models import build, run, sample

from dstrain.model.router import Router, best


def router(**overrides) -> Router:
    config = tiny_config(**{"hidden_size": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, **overrides})
    gate = Router(config, torch.float64)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(8, dtype=torch.float64))  # the hidden state is the logits
    return gate


def logits(*values):
    return torch.tensor(values, dtype=torch.float64).view(1, 1, -1)


def test_equal_scores_go_to_the_lower_experts_with_equal_weights():
    """All logits equal, k = 8: each weight is 2.5 / 8."""
    gate = router(num_experts_per_tok=8, n_group=1, topk_group=1)
    routing = gate(torch.zeros(1, 1, 8, dtype=torch.float64), count=False)
    assert routing.topk_ids.tolist() == [list(range(8))]
    torch.testing.assert_close(routing.topk_weights, torch.full((1, 8), 2.5 / 8, dtype=torch.float64))
    two = router(num_experts_per_tok=2)
    assert two(torch.zeros(1, 1, 8, dtype=torch.float64), count=False).topk_ids.tolist() == [[0, 1]]


def test_groups_left_out_never_win_even_when_every_kept_score_is_negative():
    """With biases of -1 the kept scores are negative; a mask of 0 would let masked experts win."""
    gate = router(num_experts_per_tok=3)
    gate.e_score_correction_bias.fill_(-2.0)
    ids = gate(logits(0.1, 0.2, 3.0, 2.0, 0.1, 0.1, 2.5, 2.4), count=False).topk_ids
    # groups {2,3} and {6,7} are kept
    assert ids.tolist() == [[2, 6, 7]]


def test_a_group_scores_its_two_best_biased_scores_in_v3_and_its_best_in_v2():
    values = logits(4.0, -9.0, 1.0, 1.0, 0.9, 0.9, -9.0, -9.0)
    v3 = router(num_experts_per_tok=2, topk_group=1)
    assert v3(values, count=False).topk_ids.tolist() == [[2, 3]]  # σ(1)·2 > σ(4) + σ(-9)
    v2 = router(num_experts_per_tok=2, topk_group=1, topk_method="group_limited_greedy", scoring_func="softmax")
    assert v2(values, count=False).topk_ids.tolist() == [[0, 1]]


def test_weights_come_from_the_unbiased_score():
    """Bias 12 selects an expert of logit -18.4: its weight is σ(-18.4) = 1.0e-8, neither 12 nor 0."""
    gate = router(num_experts_per_tok=1, n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0)
    gate.e_score_correction_bias[5] = 12.0
    routing = gate(logits(0, 0, 0, 0, 0, -18.4, 0, 0), count=False)
    assert routing.topk_ids.item() == 5
    assert routing.topk_weights.item() == pytest.approx(1.0208e-8, rel=1e-3)


def test_a_bias_that_changes_no_choice_changes_no_weight():
    values = logits(3, 2, 1, 0, -1, -2, -3, -4)
    gate = router(num_experts_per_tok=3)
    before = gate(values, count=False)
    gate.e_score_correction_bias.add_(0.01)
    after = gate(values, count=False)
    assert torch.equal(before.topk_ids, after.topk_ids) and torch.equal(before.topk_weights, after.topk_weights)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_normalisation_and_scale_are_independent(normalise, scale):
    gate = router(num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=normalise, routed_scaling_factor=scale)
    weights = gate(logits(0, 0, -9, -9, -9, -9, -9, -9), count=False).topk_weights
    torch.testing.assert_close(weights, torch.full((1, 2), 0.5 * scale, dtype=torch.float64), rtol=1e-12, atol=0)


def test_best_orders_ties_by_index():
    assert best(torch.tensor([1.0, 3.0, 3.0, 1.0, 3.0]), 4).tolist() == [1, 2, 4, 0]


def test_best_of_many_is_the_stable_order_with_ties_zeros_of_both_signs_and_what_is_no_number():
    """Right is NumPy's stable sort of the negated scores; few distinct values, so every row has ties."""
    scores = torch.randint(-40, 40, (3, 512, 256), generator=torch.Generator().manual_seed(0)) / 7
    scores = torch.where(scores == 0, torch.tensor([0.0, -0.0]).repeat(128), scores)
    scores[0, :, 1::5], scores[1, :, ::3], scores[2, 7, 5:9] = -torch.inf, scores[1, :, ::3] * 1e-42, torch.inf
    right = np.argsort(-scores.numpy() + 0.0, axis=-1, kind="stable")
    for k in (1, 8, 256):
        assert best(scores, k).tolist() == right[..., :k].tolist()
    assert best(scores.double(), 8).tolist() == right[..., :8].tolist()
    scores[1, 3, 200] = torch.nan
    assert best(scores, 1)[1, 3].item() == 200  # as a sort has it: the step is not finite, but no choice is out of range


@pytest.mark.parametrize("alpha", [0.0, 1e-2, 2e-2])
def test_the_balance_loss_reaches_the_router_in_proportion_to_alpha(alpha):
    """FAULTS A10: 0 and 1e-2 differ, doubling doubles the part that it adds (the whole is checked by the oracle)."""
    config = tiny_config()
    tokens, documents = sample(config)
    grads = {}
    for value in (0.0, 1e-2, alpha):
        model, _ = build(config, torch.float64)
        run(model, config, tokens, documents, False, alpha=value)
        grads[value] = model.routers[0].weight.main_grad.clone()
    part = grads[1e-2] - grads[0.0]
    assert part.abs().max() > 1e-6
    torch.testing.assert_close(grads[alpha] - grads[0.0], part * (alpha / 1e-2), rtol=1e-6, atol=1e-12)


def test_load_counts_training_tokens_only():
    config = tiny_config()
    model, _ = build(config, torch.float32)
    tokens, documents = sample(config)
    from dstrain.model.batch import MicroBatch
    from dstrain.model.loss import LossSums
    from dstrain.model.units import evaluate
    from dstrain.parallel.dispatch import LocalDispatcher

    evaluate(model, MicroBatch(tokens, documents, 2), LocalDispatcher(), LossSums(2, torch.device("cpu")))
    assert all(router.load.sum() == 0 for router in model.routers)
    run(model, config, tokens, documents, False)
    assert all(router.load.sum() == tokens.shape[0] * 16 * config.num_experts_per_tok for router in model.routers)
