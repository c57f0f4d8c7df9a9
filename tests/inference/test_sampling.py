"""Sampling against the distribution worked out by hand (FAULTS D15)."""

import torch

from dstrain.inference.sampling import distribution, sample

LOGITS = torch.log(torch.tensor([[0.1, 0.4, 0.3, 0.2]]))
WARM = torch.ones(1)


def test_temperature_divides_the_logits():
    expected = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64) ** 2
    torch.testing.assert_close(distribution(LOGITS, WARM / 2, 1.0, None), expected / expected.sum(), rtol=1e-6, atol=0)


def test_top_k_and_top_p_keep_the_most_probable():
    torch.testing.assert_close(distribution(LOGITS, WARM, 1.0, 2)[0], torch.tensor([0, 4 / 7, 3 / 7, 0], dtype=torch.float64), rtol=1e-6, atol=1e-9)
    # 0.4 < 0.6 <= 0.4 + 0.3: two tokens reach it
    torch.testing.assert_close(distribution(LOGITS, WARM, 0.6, None)[0], torch.tensor([0, 4 / 7, 3 / 7, 0], dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_extremes_always_leave_a_token():
    for top_p, top_k in ((0.0, None), (1e-9, None), (1.0, 1), (0.0, 1000)):
        assert distribution(LOGITS, WARM, top_p, top_k).tolist() == [[0, 1, 0, 0]]
    torch.testing.assert_close(distribution(LOGITS, WARM, 1.0, 1000)[0].float(), LOGITS[0].exp(), rtol=1e-6, atol=0)


def test_no_temperature_is_too_hot_or_too_cold():
    logits = torch.cat([LOGITS, torch.full((1, 1), -torch.inf)], dim=1)  # an id that the tokenizer has not
    hot = distribution(logits, torch.tensor([1e300], dtype=torch.float64), 1.0, None)
    torch.testing.assert_close(hot, torch.tensor([[0.25, 0.25, 0.25, 0.25, 0]], dtype=torch.float64))
    cold = distribution(logits, torch.tensor([1e-320], dtype=torch.float64), 1.0, None)
    assert cold.tolist() == [[0, 1, 0, 0, 0]]


def test_temperature_0_is_argmax_beside_a_sampled_row_and_ties_go_to_the_first():
    logits = torch.tensor([[1.0, 5.0, 5.0], [0.0, 0.0, 0.0]])
    probs = distribution(logits, torch.tensor([0.0, 1.0]), 1.0, None)
    assert probs[0].tolist() == [0, 1, 0]
    torch.testing.assert_close(probs[1], torch.full((3,), 1 / 3, dtype=torch.float64))
    draws = [sample(probs, torch.Generator().manual_seed(seed))[0].item() for seed in range(20)]
    assert set(draws) == {1}


def test_samples_follow_the_distribution_and_the_seed():
    probs = torch.tensor([[0.1, 0.0, 0.6, 0.3]], dtype=torch.float64).expand(20000, -1)
    ids = sample(probs, torch.Generator().manual_seed(5))
    assert torch.equal(ids, sample(probs, torch.Generator().manual_seed(5)))
    shares = torch.bincount(ids, minlength=4) / 20000
    # four standard deviations of a share of 0.6 over 20000 draws are 0.014
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.6, 0.3]), rtol=0, atol=0.014)
    assert shares[1] == 0


def test_masked_tokens_are_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf]])
    assert distribution(logits, WARM, 1.0, None).tolist() == [[0.5, 0, 0.5, 0]]
