"""Decoding with MTP drafts: what is drafted, what comes out, and how it is distributed (FAULTS D11, D15).

Right values: the paper's equations without a cache (the oracle) for what the modules draft and for the exact chance of
every text; decoding without drafts, which test_decoder holds to the oracle, for greedy texts. The models are random and
know few tokens, so that drafts are accepted and rejected at every depth.
"""

import pytest
import torch
from oracle import oracle, tiny_config
from small_models import build

from dstrain.inference import decoder as decoder_module
from dstrain.inference.decoder import Decoder
from dstrain.inference.drafts import Drafter, verify
from dstrain.inference.generation import Generation, Sampling
from dstrain.model.model import Few
from dstrain.parallel.dispatch import LocalDispatcher

DEPTHS = [1, 2, 3, 4]


def model_of(vocab_size, dtype, depth=4, seed=3):
    config = tiny_config(vocab_size=vocab_size, num_nextn_predict_layers=depth)
    model, weights = build(config, dtype, seed)
    return config, model, weights


def random_prompts(count, vocab_size, longest=12):
    generator = torch.Generator().manual_seed(7)
    lengths = [1, longest, *torch.randint(1, longest + 1, (count - 2,), generator=generator).tolist()]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def run(model, prompts, limit, drafts, temperature=0.0, **sampling):
    """-> the texts, and the finished generation."""
    temperature = temperature if isinstance(temperature, list) else [temperature] * len(prompts)
    generation = Generation(model, LocalDispatcher(), prompts, limit, Sampling(temperature, **sampling), drafts)
    texts = [[] for _ in prompts]
    for fresh in generation.rounds():
        for text, ids in zip(texts, fresh):
            text += ids
    return texts, generation


def plain_greedy(model, prompts, limit):
    """Greedy texts by the decoder alone, token by token."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    decoder = Decoder(model, LocalDispatcher(), len(prompts), int(lengths.max()) + limit)
    chosen = [decoder.advance(padded, lengths).argmax(-1)]
    while len(chosen) < limit:
        chosen.append(decoder.advance(chosen[-1].unsqueeze(1)).argmax(-1))
    return torch.stack(chosen, dim=1).tolist()


@pytest.mark.parametrize("compile", [lambda function: function, pytest.param(None, marks=pytest.mark.long)])
def test_greedy_texts_by_functions_of_a_few_tokens_are_those_without_drafts(compile):
    """Merging, blocks and heads as functions, plain and compiled."""
    _, model, _ = model_of(8, torch.float64)
    prompts = random_prompts(2, 8, longest=6)
    expected = plain_greedy(model, prompts, 12)
    model.freeze(compiled=compile is None)
    if compile is not None:
        model.few = Few(model, compile)
    assert run(model, prompts, 12, drafts=2)[0] == expected


@pytest.mark.parametrize("drafts", DEPTHS)
def test_greedy_texts_are_those_without_drafts(drafts):
    """50 prompts of 1 to 12 tokens in one batch, in fp32."""
    _, model, _ = model_of(4, torch.float32)
    prompts = random_prompts(50, 4)
    texts, generation = run(model, prompts, 16, drafts)
    assert texts == plain_greedy(model, prompts, 16)
    assert all(0 < accepted < generation.steps for accepted in generation.accepted), "all ways must have been taken"


@pytest.mark.parametrize("drafts", DEPTHS)
def test_the_modules_draft_what_the_equations_say(drafts, monkeypatch):
    """Every draft of every round, for sequences of different lengths; long prompts are taken in parts."""
    config, model, weights = model_of(5, torch.float64, depth=drafts)
    monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", 3)
    rounds, original = [], Drafter.draft

    def spy(drafter, tokens, known, states, choose):
        before = tokens.clone()
        drafted, chances = original(drafter, tokens, known, states, choose)
        rounds.append((before, known.tolist(), drafted, chances))
        return drafted, chances

    monkeypatch.setattr(Drafter, "draft", spy)
    prompts = [[3], [1, 4, 0, 2, 2, 1, 0], [2, 0]]
    run(model, prompts, 6, drafts, temperature=1.0)
    assert len(rounds) > 2
    for tokens, known, drafted, chances in rounds:
        for row, length in enumerate(known):
            if length - len(prompts[row]) >= 6:  # has ended
                continue
            whole = torch.cat((tokens[row, :length], drafted[row])).unsqueeze(0)
            by_depth = oracle(config, weights, whole, balance_alpha=0.0, mtp_weight=0.0).logits
            for k in range(1, drafts + 1):
                expected = by_depth[k][0, length - 2].detach().softmax(-1)
                torch.testing.assert_close(chances[row, k - 1], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("drafts", [0, *DEPTHS])
def test_end_mark_and_limit_inside_drafts(drafts):
    _, model, _ = model_of(4, torch.float32)
    prompts = random_prompts(12, 4)
    whole = plain_greedy(model, prompts, 12)
    for limit in range(1, 7):
        assert run(model, prompts, limit, drafts)[0] == [text[:limit] for text in whole]
    for eos in range(4):
        expected = [text[: text.index(eos)] if eos in text else text for text in whole]
        assert run(model, prompts, 12, drafts, eos_id=eos)[0] == expected
        assert len({len(text) for text in expected}) > 2, "sequences must end at different times"


def exact_chances(config, weights, prompt, length, temperature, top_k, top_p):
    """Of every text of `length` tokens, by the oracle; sampling's rules are worked out here once more."""
    chances = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in chances.items():
            padded = torch.tensor([[*prompt, *text, *[0] * (1 + config.num_nextn_predict_layers)]])
            logits = oracle(config, weights, padded, balance_alpha=0.0, mtp_weight=0.0).logits[0][0, -1]
            probs = (logits.detach() / temperature).exp().tolist()
            order = sorted(range(len(probs)), key=lambda j: -probs[j])[:top_k]
            total, kept, reached = sum(probs[j] for j in order), [], 0.0
            for j in order:
                if reached < top_p:
                    kept.append(j)
                    reached += probs[j] / total
            for j in range(len(probs)):
                longer[*text, j] = chance * (probs[j] / sum(probs[i] for i in kept) if j in kept else 0.0)
        chances = longer
    return chances


@pytest.mark.parametrize(
    "vocab_size, length, top_k, top_p", [(2, 4, None, 1.0), (4, 3, 3, 0.9)], ids=["two tokens", "top_k and top_p"]
)
@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_sampled_texts_have_their_exact_chances(drafts, vocab_size, length, top_k, top_p):
    """Chi-square over all texts; 0.1 % of correct samplers would fail, but the seed is fixed."""
    config, model, weights = model_of(vocab_size, torch.float64, depth=2, seed=4)
    temperature, samples, prompt = 3.0, 3000, [1, 0]
    chances = exact_chances(config, weights, prompt, length, temperature, top_k, top_p)
    assert abs(sum(chances.values()) - 1) < 1e-9
    texts, generation = run(model, [prompt] * samples, length, drafts, temperature, top_k=top_k, top_p=top_p, seed=1)
    seen = {text: 0 for text in chances}
    for text in texts:
        seen[tuple(text)] += 1
    assert all(seen[text] == 0 for text, chance in chances.items() if chance == 0)
    possible = [text for text, chance in chances.items() if chance * samples >= 5]
    rare = sum(chances[text] for text in chances if text not in possible) * samples
    square = sum((seen[text] - chances[text] * samples) ** 2 / (chances[text] * samples) for text in possible)
    if rare >= 5:
        square += (sum(seen[text] for text in chances if text not in possible) - rare) ** 2 / rare
    freedom = len(possible) - 1 + (rare >= 5)
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is close to normal.
    spread = 2 / (9 * freedom)
    assert ((square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 3.09, (square, freedom)
    assert all(0.05 < n / generation.steps < 0.98 for n in generation.accepted), "drafts must be accepted and rejected"


def test_the_rejection_rule_by_hand():
    wanted = torch.tensor([[[0.2, 0.5, 0.3], [0.6, 0.2, 0.2], [0.1, 0.1, 0.8]]], dtype=torch.float64)
    drafts = torch.tensor([[[0.4, 0.5, 0.1], [0.1, 0.8, 0.1]]], dtype=torch.float64)

    def both(first, second, draws):
        accepted, rest = verify(torch.tensor([[first, second]]), drafts, wanted, torch.tensor([draws], dtype=torch.float64))
        return accepted.item(), (rest / rest.sum()).squeeze(0).tolist()

    assert both(0, 0, [0.49, 0.99]) == (2, pytest.approx([0.1, 0.1, 0.8]))  # 0.2/0.4, and 0.6 > 0.1
    assert both(0, 0, [0.51, 0.0]) == (0, pytest.approx([0, 0, 1]))  # what is wanted beyond the drafts: 0.3 - 0.1 of the last
    assert both(1, 1, [0.99, 0.24]) == (2, pytest.approx([0.1, 0.1, 0.8]))  # 0.2/0.8
    assert both(1, 1, [0.99, 0.26]) == (1, pytest.approx([5 / 6, 0, 1 / 6]))  # 0.5 and 0.1
    same = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    accepted, rest = verify(torch.tensor([[0]]), same, same.expand(1, 2, 2) * (1 - 1e-16), torch.full((1, 1), 1.0, dtype=torch.float64))
    assert accepted.item() == 0 and rest.tolist() == [pytest.approx([0.5, 0.5])]  # rounding left nothing: what is wanted itself


def test_greedy_beside_sampled_sequences_and_a_fixed_seed():
    """FAULTS D15: temperature 0 is argmax whatever the others in the batch do, and a seed repeats everything."""
    _, model, _ = model_of(4, torch.float32)
    prompts = random_prompts(6, 4)
    mixed = [0.0, 5.0, 0.0, 1.0, 5.0, 0.0]
    for drafts in (0, 2):
        texts, _ = run(model, prompts, 10, drafts, mixed, seed=5)
        greedy = plain_greedy(model, prompts, 10)
        assert all(text == greedy[row] for row, text in enumerate(texts) if mixed[row] == 0)
        assert run(model, prompts, 10, drafts, mixed, seed=5)[0] == texts
        assert any(run(model, prompts, 10, drafts, mixed, seed=seed)[0] != texts for seed in range(3))


def test_ids_that_the_tokenizer_has_not_are_never_drafted():
    _, model, _ = model_of(6, torch.float32)
    texts, _ = run(model, [[0, 1]] * 40, 8, 2, temperature=1e6, vocab_size=3)
    assert {token for text in texts for token in text} == {0, 1, 2}
