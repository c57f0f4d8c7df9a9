"""Fill-in-the-middle: documents rearranged with nothing lost, by (seed, epoch, document) alone."""

import json
from collections import Counter

import numpy as np
import pytest

import megatron_format
from dstrain.config.errors import InputError
from dstrain.data.fim import FillInTheMiddle
from dstrain.data.indexed import IndexedDataset
from dstrain.data.samples import SampleStream, shuffled
from dstrain.data.tokenizer import Tokenizer

BOS, EOS, BEGIN, HOLE, END = 0, 1, 4, 3, 5  # ids of the special tokens that a tokenizer trained here has

# D04: ten tokens, two, one, none, no end mark, no begin mark, neither, an empty document, one of many samples' length.
DOCUMENTS = [
    [BOS, *range(10, 20), EOS], [BOS, 20, 21, EOS], [BOS, 22, EOS], [BOS, EOS], [BOS, *range(30, 40)],
    [*range(40, 50), EOS], [*range(50, 60)], [], [BOS, *range(100, 200), EOS], [BOS, 60, 60, 60, EOS],
]  # fmt: skip
ABLE = [i for i, document in enumerate(DOCUMENTS) if len(document) >= 3]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["some text"], 264)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "d"
    megatron_format.write(prefix, [[document[:2], document[2:]] for document in DOCUMENTS])  # across sequences too
    return IndexedDataset(prefix)


def documents_of(epochs, epoch):
    return [epochs.read(epoch, i, 0, int(size)).tolist() for i, size in enumerate(epochs.lengths(epoch))]


def rejoined(ids):
    """The document that a rearranged one came from, by the definition; fails unless every mark is in its place."""
    first, last = int(ids[0] == BOS), len(ids) - (ids[-1] == EOS)
    assert [ids.count(mark) for mark in (BEGIN, HOLE, END)] == [1, 1, 1] and ids[first] == BEGIN
    hole, end = ids.index(HOLE), ids.index(END)
    prefix, suffix, middle = ids[first + 1 : hole], ids[hole + 1 : end], ids[end + 1 : last]
    assert hole < end and middle and not {BOS, EOS} & {*prefix, *suffix, *middle}
    return [*ids[:first], *prefix, *middle, *suffix, *ids[last:]]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1.0])
def test_pieces_rejoin_to_the_document_and_marks_keep_their_places(dataset, tokenizer, rate):
    epochs = FillInTheMiddle(dataset, 7, rate, tokenizer)
    count = round(rate * len(ABLE))
    for epoch in range(20):
        lengths, found = epochs.lengths(epoch), documents_of(epochs, epoch)
        chosen = [i for i in range(len(DOCUMENTS)) if found[i] != DOCUMENTS[i]]
        assert len(chosen) == count and set(chosen) <= set(ABLE)  # the rate holds in every epoch
        for i in chosen:
            assert rejoined(found[i]) == DOCUMENTS[i] and lengths[i] == len(DOCUMENTS[i]) + 3
        assert lengths.sum() == epochs.num_tokens == sum(map(len, DOCUMENTS)) + 3 * count


def test_a_document_of_one_token_has_it_in_the_middle(dataset, tokenizer):
    found = documents_of(FillInTheMiddle(dataset, 7, 1.0, tokenizer), 0)
    assert found[2] == [BOS, BEGIN, HOLE, END, 22, EOS] and found[3] == [BOS, EOS] and found[7] == []


def test_any_part_of_a_document_is_that_part_of_the_whole(dataset, tokenizer):
    epochs = FillInTheMiddle(dataset, 3, 1.0, tokenizer)
    for document in (0, 1, 4, 5, 6, 9):
        size = int(epochs.lengths(2)[document])
        whole = epochs.read(2, document, 0, size).tolist()
        for start in range(size + 1):
            for end in range(start, size + 1):
                assert epochs.read(2, document, start, end - start).tolist() == whole[start:end]


def test_every_pair_of_cuts_is_equally_likely(dataset, tokenizer):
    """Ten tokens have 55 pairs of cuts; of 11,000 epochs each has 200 +- 5 standard deviations (14)."""
    epochs = FillInTheMiddle(dataset, 1, 1.0, tokenizer)
    counts = Counter(epochs.cuts(epoch, 0, 10) for epoch in range(11_000))
    assert set(counts) == {(a, b) for a in range(11) for b in range(a + 1, 11)}
    assert all(abs(count - 200) < 70 for count in counts.values())


def test_every_document_is_chosen_as_often(dataset, tokenizer):
    epochs = FillInTheMiddle(dataset, 1, 0.5, tokenizer)
    counts = sum(epochs.chosen(epoch).astype(int) for epoch in range(2000))
    expected = 2000 * epochs.count / len(ABLE)
    assert all(abs(counts[i] - expected) < 120 if i in ABLE else counts[i] == 0 for i in range(len(DOCUMENTS)))


def test_the_choice_does_not_follow_the_order_of_documents(tmp_path, tokenizer):
    """Of 2000 documents half are rearranged: of the first 1000 in the epoch's order 500 +- 5 standard deviations (11)."""
    megatron_format.write(tmp_path / "a", [[[BOS, 9, 9, EOS]]] * 2000)
    epochs = FillInTheMiddle(IndexedDataset(tmp_path / "a"), 5, 0.5, tokenizer)
    for epoch in range(3):
        assert abs(int(epochs.chosen(epoch)[shuffled(2000, 5, epoch)[:1000]].sum()) - 500) < 56


def test_seed_epoch_and_document_decide(dataset, tokenizer):
    """A18, A20: the same for every reader, in whatever order; another epoch or seed is another arrangement."""
    first, again = (FillInTheMiddle(dataset, 7, 0.5, tokenizer) for _ in range(2))
    forwards = [documents_of(first, epoch) for epoch in range(8)]
    backwards = [documents_of(again, epoch) for epoch in reversed(range(8))][::-1]
    assert forwards == backwards and len(again._chosen) <= 3
    assert len({json.dumps(documents) for documents in forwards}) == 8
    assert documents_of(FillInTheMiddle(dataset, 8, 0.5, tokenizer), 0) != forwards[0]


def test_the_arrangement_is_fixed_for_good(dataset, tokenizer):
    """Written down once: another version of this code must not rearrange a run that is under way."""
    epochs = FillInTheMiddle(dataset, 1234, 0.5, tokenizer)
    assert np.flatnonzero(epochs.chosen(0)).tolist() == CHOSEN
    assert [epochs.cuts(epoch, 8, 100) for epoch in range(3)] == CUTS


CHOSEN = [2, 4, 5, 8]
CUTS = [(3, 75), (44, 55), (16, 79)]


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("length, depth", [(1, 0), (8, 1), (40, 2)])
def test_samples_tile_the_stream_of_rearranged_documents(dataset, tokenizer, rate, length, depth):
    """The right value: the documents of each epoch, as above, one after the other in the epoch's order."""
    epochs = FillInTheMiddle(dataset, 11, rate, tokenizer)
    whole, numbers, count = [], [], 0
    for epoch in range(5):
        documents = documents_of(epochs, epoch)
        for i in shuffled(len(DOCUMENTS), 11, epoch):
            whole += documents[i]
            numbers += [count] * len(documents[i])
            count += 1
    stream = SampleStream(dataset, 11, length, depth, FillInTheMiddle(dataset, 11, rate, tokenizer))
    width = length + 1 + depth
    for i in range((len(whole) - width) // length):
        tokens, own = stream.sample(i)
        part = slice(i * length, i * length + width)
        assert tokens.tolist() == whole[part]
        assert own.tolist() == np.unique(numbers[part], return_inverse=True)[1].tolist()
    if rate == 0:
        plain = SampleStream(dataset, 11, length, depth)
        assert all(np.array_equal(plain.sample(i), stream.sample(i)) for i in range(50))


def test_a_tokenizer_without_the_marks_is_named(dataset, tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer.json")
    text = (tmp_path / "tokenizer.json").read_text()
    with pytest.raises(InputError, match="other.json: no tokens for fill-in-the-middle.*<｜fim▁hole｜>.*<fim_suffix>"):
        FillInTheMiddle(dataset, 0, 0.5, Tokenizer(text.replace("fim▁hole", "gap"), "other.json"))
    renamed = text.replace("<｜fim▁begin｜>", "<fim_prefix>").replace("<｜fim▁hole｜>", "<fim_suffix>")
    other = Tokenizer(renamed.replace("<｜fim▁end｜>", "<fim_middle>"), "other.json")
    assert other.fim_ids() == (BEGIN, HOLE, END) == tokenizer.fim_ids()
