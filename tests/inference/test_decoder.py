"""Cached, absorbed decoding against the full forward pass without a cache (FAULTS D11)."""

import pytest
import torch
from oracle import oracle, tiny_config
from small_models import GRID, build

from dstrain.inference.decoder import CachedBlocks, Decoder
from dstrain.model.model import Few
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.precision import gemm
from dstrain.precision.few import few_ffn, few_linear, weight_first


def full_logits(config, weights, tokens):
    """Logits of the main model at every position by the oracle, [L, vocab]."""
    padded = torch.cat((tokens, torch.zeros(1 + config.num_nextn_predict_layers, dtype=torch.int64))).unsqueeze(0)
    return oracle(config, weights, padded, balance_alpha=0.0, mtp_weight=0.0).logits[0][0].detach()


@pytest.mark.parametrize("chunk", [1, 8, 37])
@pytest.mark.parametrize("case", GRID)
def test_cached_logits_equal_the_full_forward(case, chunk):
    config = tiny_config(**GRID[case])
    model, weights = build(config, torch.float64)
    tokens = torch.randint(0, config.vocab_size, (37,), generator=torch.Generator().manual_seed(1))
    expected = full_logits(config, weights, tokens)
    decoder = Decoder(model, LocalDispatcher(), sequences=1, capacity=37)
    for first in range(0, 37, chunk):
        logits = decoder.advance(tokens[first : first + chunk].unsqueeze(0))
        last = min(first + chunk, 37) - 1
        torch.testing.assert_close(logits[0], expected[last], rtol=1e-9, atol=1e-9)


def test_sequences_of_different_lengths_decode_together_and_the_next_batch_starts_clean():
    config = tiny_config()
    model, weights = build(config, torch.float64)
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([5, 11, 1])
    for _ in range(2):
        prompts = torch.randint(0, config.vocab_size, (3, 11), generator=generator)
        following = torch.randint(0, config.vocab_size, (3, 4), generator=generator)
        decoder = Decoder(model, LocalDispatcher(), sequences=3, capacity=16)
        steps = [decoder.advance(prompts, lengths)] + [decoder.advance(following[:, [i]]) for i in range(4)]
        for row, length in enumerate(lengths.tolist()):
            whole = torch.cat((prompts[row, :length], following[row]))
            expected = full_logits(config, weights, whole)
            for i, logits in enumerate(steps):
                torch.testing.assert_close(logits[row], expected[length - 1 + i], rtol=1e-9, atol=1e-9)


def test_a_long_prompt_is_taken_in_parts(monkeypatch):
    import dstrain.inference.decoder as module

    config = tiny_config()
    model, weights = build(config, torch.float64)
    tokens = torch.randint(0, config.vocab_size, (20,), generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(module, "PREFILL_TOKENS", 7)
    decoder = Decoder(model, LocalDispatcher(), sequences=1, capacity=20)
    torch.testing.assert_close(decoder.advance(tokens.unsqueeze(0))[0], full_logits(config, weights, tokens)[-1], rtol=1e-9, atol=1e-9)
    assert decoder.lengths.tolist() == [20]


def test_the_cache_holds_the_latent_and_one_rotated_key_and_nothing_per_head():
    """It grows by 64 tokens at a time."""
    config = tiny_config()
    decoder = Decoder(build(config, torch.float32)[0], LocalDispatcher(), sequences=2, capacity=70)
    for tokens, room in ((10, 64), (54, 64), (1, 128)):
        decoder.advance(torch.zeros(2, tokens, dtype=torch.int64))
        elements = sum(x.numel() for cache in decoder.stack.caches for x in vars(cache).values())
        assert elements == 2 * room * config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)


def test_more_tokens_than_the_cache_holds_are_an_error():
    config = tiny_config()
    decoder = Decoder(build(config, torch.float32)[0], LocalDispatcher(), sequences=1, capacity=4)
    with pytest.raises(ValueError, match="5 tokens do not fit into a cache of 4"):
        decoder.advance(torch.zeros(1, 5, dtype=torch.int64))


@pytest.mark.parametrize("case", GRID)
def test_a_frozen_model_computes_the_same_from_the_same_weights(case):
    """Joined and absorbed weights: the prompt, one token, and several at once, against the model as it was."""
    config = tiny_config(**GRID[case])
    model, _ = build(config, torch.float64)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(0, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(4))

    def logits():
        decoder = Decoder(model, LocalDispatcher(), sequences=2, capacity=12)
        return [decoder.advance(tokens[:, first:last]) for first, last in ((0, 5), (5, 6), (6, 7), (7, 12))]

    before = logits()
    assert model.freeze().blocks[-1].mlp.experts.gate_proj.joined is not None
    for one, other in zip(before, logits()):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    state = model.state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(tensor, weights[name]) for name, tensor in state.items())
    # One memory: what is written into a weight later is seen.
    mlp = model.blocks[0].mlp
    mlp.up_proj.weight[0, 0] = 7.0
    assert mlp.gate_proj.joined[len(mlp.gate_proj.weight), 0] == 7.0


def steps_of(config, model):
    """Logits of three sequences of different lengths: the prompt, then one token and several at once; and one alone."""
    tokens = torch.randint(0, config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(5))
    decoder = Decoder(model, LocalDispatcher(), sequences=3, capacity=80)
    logits = [decoder.advance(tokens, torch.tensor([12, 3, 7]))]
    logits += [decoder.advance(tokens[:, :n]) for n in (1, 1, 4, 1)]
    alone = Decoder(model, LocalDispatcher(), sequences=1, capacity=80)
    logits += [alone.advance(tokens[:1, :n]) for n in (12, 1, 1, 2)]
    logits += [alone.advance(tokens[:1, [i % 12]]) for i in range(50)]  # over the cache's first 64 entries
    return logits


@pytest.mark.parametrize("case", GRID)
def test_a_block_as_one_function_computes_what_its_phases_do(case):
    """`Block.few`, which is there to be compiled; a prompt of 36 tokens still goes through the phases."""
    config = tiny_config(**GRID[case])
    model = build(config, torch.float64)[0].freeze()
    expected = steps_of(config, model)
    model.few = Few(model, lambda function: function)
    for one, other in zip(steps_of(config, model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-5)])
def test_a_block_as_one_function_rounds_as_its_phases_do(dtype, tolerance):
    """A dense block and one with experts, whose FFN's input is wide in the function."""
    config = tiny_config()
    model = build(config, dtype)[0].freeze()
    few = Few(model, lambda function: function)
    for block in model.blocks:
        hidden = torch.randn(3, 2, config.hidden_size, generator=torch.Generator().manual_seed(11)).to(dtype)
        stack = CachedBlocks(model, [block], LocalDispatcher(), 3, 8)
        outs = []
        for way in (None, few):
            model.few = way
            outs.append(stack.run(hidden, torch.zeros(3, dtype=torch.int64)))
        assert outs[1].dtype == dtype
        torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_compiled_blocks_compute_what_the_phases_do(dtype, tolerance):
    config = tiny_config()
    model = build(config, dtype)[0].freeze(compiled=True)
    compiled = steps_of(config, model)
    model.few = None
    for one, other in zip(compiled, steps_of(config, model), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_products_of_few_rows_as_loops_are_the_products():
    x, weight = torch.randn(2, 1, 24, dtype=torch.float64), torch.randn(10, 24, dtype=torch.float64)
    torch.testing.assert_close(few_linear(x, weight), x @ weight.t(), rtol=1e-12, atol=1e-12)
    # (1 + 2⁻⁷)² - (1 + 2⁻⁶) = 2⁻¹⁴; with products rounded to BF16 nothing would be left.
    x, weight = torch.tensor([[1 + 2**-7, 1.0]]).bfloat16(), torch.tensor([[1 + 2**-7, -1 - 2**-6]]).bfloat16()
    assert few_linear(x, weight).tolist() == [[2**-14]] and few_linear(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_experts_of_a_few_tokens_are_their_ffns_in_float64(dtype, tolerance):
    """Five tokens of three choices; an expert is chosen by several, and one by none."""
    generator = torch.Generator().manual_seed(9)
    gate_up, down = (torch.randn(4, *shape, generator=generator).to(dtype) for shape in ((2 * 6, 16), (16, 6)))
    weights = torch.rand(5, 3, generator=generator)
    ids = torch.tensor([[0, 1, 3], [3, 0, 1], [1, 3, 0], [0, 3, 1], [3, 1, 0]])
    x = torch.randn(5, 16, generator=generator).to(dtype).to(torch.promote_types(dtype, torch.float32))
    expected = torch.zeros(5, 16, dtype=torch.float64)
    for token, choices in enumerate(ids.tolist()):
        for choice, expert in enumerate(choices):
            gate, up = (gate_up[expert].double() @ x[token].double()).view(2, 6)
            inner = torch.nn.functional.silu(gate) * up * weights[token, choice].double()
            expected[token] += down[expert].double() @ inner
    out = few_ffn(x, ids, weights.to(x.dtype), gate_up, down)
    assert out.dtype == dtype
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_bf16_products_with_the_weight_first_are_those_in_float64(rows):
    generator = torch.Generator().manual_seed(10)
    x, weight = (torch.randn(n, 1, 40, generator=generator).bfloat16() for n in (rows, 24))
    expected = x.double() @ weight[:, 0].double().t()
    out = weight_first(x, weight[:, 0])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9])
def test_products_of_few_fp32_rows_are_those_in_float64(rows):
    """Alone and expert by expert, one of them without rows."""
    generator = torch.Generator().manual_seed(6)
    x, weights = torch.randn(rows, 2, 40, generator=generator), torch.randn(3, 24, 40, generator=generator)
    torch.testing.assert_close(gemm.fprop(x, weights[0]).double(), x.double() @ weights[0].double().t(), rtol=1e-5, atol=1e-5)
    flat, offsets = x.flatten(0, 1), torch.tensor([rows, rows, 2 * rows], dtype=torch.int32)
    expected = torch.cat((flat[:rows].double() @ weights[0].double().t(), flat[rows:].double() @ weights[2].double().t()))
    torch.testing.assert_close(gemm.grouped_fprop(flat, weights, offsets).double(), expected, rtol=1e-5, atol=1e-5)
    assert gemm.fprop(x[:0], weights[0]).shape == (0, 2, 24)


def test_an_fp32_model_decodes_as_the_oracle_says():
    """Its few rows are multiplied in ways of their own, of which an FP64 model knows nothing."""
    config = tiny_config()
    model, weights = build(config, torch.float32)
    tokens = torch.randint(0, config.vocab_size, (12,), generator=torch.Generator().manual_seed(8))
    expected = full_logits(config, weights, tokens)
    decoder = Decoder(model.freeze(), LocalDispatcher(), sequences=1, capacity=12)
    for first, last in ((0, 5), (5, 6), (6, 8), (8, 12)):
        logits = decoder.advance(tokens[first:last].unsqueeze(0))
        torch.testing.assert_close(logits[0].double(), expected[last - 1], rtol=1e-4, atol=1e-4)
