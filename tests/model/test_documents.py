"""What the document mask separates (FAULTS A03, A04)."""

import torch
from oracle import tiny_config
from small_models import build, caught_logits

from dstrain.model.batch import IGNORED, MicroBatch
from dstrain.model.loss import LossSums
from dstrain.model.units import evaluate
from dstrain.parallel.dispatch import LocalDispatcher


def logits_of(model, tokens, documents, depth):
    """Logits of every depth, [L, vocab] each, of one sequence under the document mask."""
    with caught_logits() as caught:
        batch = MicroBatch(tokens.unsqueeze(0), documents.unsqueeze(0), depth, document_mask=True)
        evaluate(model, batch, LocalDispatcher(), LossSums(depth, torch.device("cpu")))
    return caught


def test_targets_stay_inside_the_document_at_every_depth():
    """Documents [10, 11, 12] and [20, 21, 22]: at depth 1 only positions 0 (target 12) and 3 (target 22) count."""
    tokens = torch.tensor([[10, 11, 12, 20, 21, 22, 9, 9]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]])
    batch = MicroBatch(tokens, documents, depth=1, document_mask=True)
    assert batch.targets(0).tolist() == [[11, 12, IGNORED, 21, 22, IGNORED]]
    assert batch.targets(1).tolist() == [[12, IGNORED, IGNORED, 22, IGNORED, IGNORED]]
    assert batch.valid_counts().tolist() == [4, 2]
    assert MicroBatch(tokens, documents, depth=1).targets(1).tolist() == [[12, 20, 21, 22, 9, 9]]


def test_the_first_document_cannot_be_seen_from_the_second():
    """Two 64-token documents: changing the first leaves the second's logits bit-identical, at every depth, and they
    equal those of the second document alone."""
    config = tiny_config(max_position_embeddings=256)
    model, _ = build(config, torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (131,), generator=generator)
    documents = torch.tensor([0] * 64 + [1] * 67)
    first = logits_of(model, tokens, documents, 2)
    changed = tokens.clone()
    changed[:64] = torch.randint(0, config.vocab_size, (64,), generator=generator)
    second = logits_of(model, changed, documents, 2)
    alone = logits_of(model, tokens[64:], documents[64:], 2)
    for a, b, c in zip(first, second, alone, strict=True):
        assert not torch.equal(a[:64], b[:64])
        assert torch.equal(a[64:], b[64:])
        torch.testing.assert_close(a[64:], c, rtol=1e-5, atol=1e-5)


def test_mtp_reads_the_embedding_first():
    """FAULTS B19: with eh_proj = [I, 0] only the embedding reaches the module, with [0, I] only the state."""
    config = tiny_config(num_nextn_predict_layers=1)
    model, _ = build(config, torch.float64)
    module, size = model.mtp_modules[0], config.hidden_size
    eye, zero = torch.eye(size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    embedded, state = torch.ones(1, 1, size, dtype=torch.float64), torch.full((1, 1, size), 2.0, dtype=torch.float64)
    with torch.no_grad():
        module.enorm.weight.fill_(3.0)
        module.hnorm.weight.fill_(5.0)
        module.eh_proj.weight.copy_(torch.cat((eye, zero), dim=1))
        torch.testing.assert_close(module.merge(embedded, state), torch.full_like(state, 3.0), rtol=1e-5, atol=0)
        module.eh_proj.weight.copy_(torch.cat((zero, eye), dim=1))
        torch.testing.assert_close(module.merge(embedded, state), torch.full_like(state, 5.0), rtol=1e-5, atol=0)
