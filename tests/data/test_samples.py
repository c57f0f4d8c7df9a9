"""Samples: a function of (seed, index) alone; evaluation windows; ids beyond the vocabulary."""

import sys
from collections import Counter

import numpy as np
import pytest
import torch

import megatron_format
from dstrain.config.errors import InputError
from dstrain.data.indexed import HEADER, MAGIC, IndexedDataset
from dstrain.data.samples import EvalWindows, SampleStream, check_ids, shuffled, scatter

# Lengths with empty documents at both ends and some longer than a sample. Every token id is its own place.
LENGTHS = [0, 3, 1, 40, 0, 0, 7, 2, 25, 1, 0]
STARTS = np.cumsum([0] + LENGTHS)
TOKENS = sum(LENGTHS)
DOCUMENT_OF = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
ORDER_0 = [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
ORDER_1 = [9, 2, 0, 7, 6, 1, 8, 4, 5, 3]  # of 10 documents, seed 1234


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "d"
    documents = [[list(range(STARTS[i], STARTS[i + 1]))] for i in range(len(LENGTHS))]
    megatron_format.write(prefix, documents)
    return IndexedDataset(prefix)


def epoch_tokens(seed, epoch):
    """The epoch's stream, put together naively from the order of its documents."""
    order = shuffled(len(LENGTHS), seed, epoch)
    return np.concatenate([np.arange(STARTS[d], STARTS[d + 1]) for d in order])


@pytest.mark.parametrize("length, depth", [(1, 0), (8, 0), (8, 1), (16, 4), (70, 3), (TOKENS - 1, 0)])
def test_sample_i_holds_the_tokens_from_i_times_l_on_of_the_endless_stream(dataset, length, depth):
    """The right value is the concatenation of all epochs; documents change exactly where a document begins."""
    stream = SampleStream(dataset, 7, length, depth)
    whole = np.concatenate([epoch_tokens(7, epoch) for epoch in range(8)])
    begins = np.concatenate([np.isin(epoch_tokens(7, epoch), STARTS[:-1]) for epoch in range(8)])
    width = length + 1 + depth
    for i in range((len(whole) - width) // length):
        tokens, documents = stream.sample(i)
        assert tokens.dtype == documents.dtype == np.int64 and tokens.shape == documents.shape == (width,)
        assert tokens.tolist() == whole[i * length : i * length + width].tolist()
        fresh = begins[i * length : i * length + width].copy()
        fresh[0] = False
        assert documents.tolist() == np.cumsum(fresh).tolist()
        assert stream.epoch_of(i) == i * length // TOKENS


def test_every_epoch_holds_every_token_once_in_another_order():
    """C07: a later epoch has its full length too."""
    orders = [epoch_tokens(3, epoch).tolist() for epoch in range(5)]
    assert all(sorted(order) == list(range(TOKENS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert epoch_tokens(4, 0).tolist() != orders[0]


def test_targets_of_an_epoch_are_each_trained_once(dataset):
    """Samples overlap by 1 + depth tokens, yet the main targets (positions 1 … L) tile the stream."""
    length, depth = 6, 2
    stream = SampleStream(dataset, 0, length, depth)
    targets = np.concatenate([stream.sample(i)[0][1 : length + 1] for i in range(3 * TOKENS // length)])
    counts = Counter(targets.tolist())
    whole = np.concatenate([epoch_tokens(0, epoch) for epoch in range(4)])[1 : len(targets) + 1]
    assert targets.tolist() == whole.tolist() and set(counts.values()) <= {2, 3, 4}


def test_a_sample_is_a_pure_function_of_seed_and_index(dataset):
    """A18, A20: whatever was read before, by whom and in which order, sample i is the same."""
    forwards = SampleStream(dataset, 11, 9, 1)
    expected = [forwards.sample(i) for i in range(200)]
    backwards = SampleStream(dataset, 11, 9, 1)
    for i in reversed(range(200)):
        for got, right in zip(backwards.sample(i), expected[i]):
            assert got.tolist() == right.tolist()
    assert len(backwards._orders) <= 3  # 23 epochs were visited
    far = SampleStream(dataset, 11, 9, 1).sample(10**15)  # about 10^14 epochs on: no walk there, no overflow
    assert far[0].tolist() == forwards.sample(10**15)[0].tolist()


def test_the_order_is_fixed_for_good():
    """Written down once: another version of NumPy or of this code must not reorder a run that is under way."""
    assert shuffled(10, 1234, 0).tolist() == ORDER_0
    assert shuffled(10, 1234, 1).tolist() == ORDER_1
    assert shuffled(1, 5, 5).tolist() == [0]


def test_all_orders_are_equally_likely():
    """Three documents have six orders; of 6000 epochs each has 1000 +- 5 standard deviations (29)."""
    counts = Counter(tuple(shuffled(3, 1, epoch).tolist()) for epoch in range(6000))
    assert len(counts) == 6 and all(abs(count - 1000) < 145 for count in counts.values())


def test_stopping_inside_an_epoch_and_going_on_loses_and_repeats_nothing(dataset):
    """A20: stop after sample 200, in the middle of a batch of 16, start anew at 200; A18: other batch sizes too."""
    whole, _ = SampleStream(dataset, 5, 8, 1).batch(0, 400)
    before, _ = SampleStream(dataset, 5, 8, 1).batch(0, 200)
    after = SampleStream(dataset, 5, 8, 1)
    resumed = torch.cat([before] + [after.batch(first, 8)[0] for first in range(200, 400, 8)])
    assert torch.equal(resumed, whole)


class Reader(torch.utils.data.Dataset):
    def __init__(self, stream):
        self.stream = stream

    def __getitem__(self, i):
        return self.stream.sample(self.stream.visited(200 + i))[0]

    def __len__(self):
        return 24


@pytest.mark.parametrize("workers", [0, 2])
def test_readers_in_other_processes_see_the_same_samples(dataset, workers):
    """A20 with workers 0 and 2."""
    stream = SampleStream(dataset, 5, 8, 1)
    rows = torch.utils.data.DataLoader(Reader(stream), batch_size=8, num_workers=workers)
    assert torch.equal(torch.cat(list(rows)), stream.batch(200, 24)[0])


def test_data_ranks_share_the_samples_whatever_their_number(dataset):
    """A18: 100 samples read by 4 ranks, then by 2 or by 8, are samples 0 … 195 in order."""
    expected = SampleStream(dataset, 5, 8, 0).batch(0, 100 + 96)[0]
    for ranks in (2, 8):
        got = torch.empty_like(expected)
        for first, last, count in ((0, 100, 4), (100, 196, ranks)):
            for rank in range(count):
                own = SampleStream(dataset, 5, 8, 0)
                for i in range(first + rank, last, count):
                    got[i] = own.batch(i, 1)[0][0]
        assert torch.equal(got, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 64, 65, 1000, 4097])
def test_scatter_is_a_permutation_that_depends_on_its_key(size):
    """A permutation reaches every number once, so sorting what it gives restores 0 … size - 1."""
    orders = [[scatter(n, size, key) for n in range(size)] for key in (0, 1, 2**40)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size > 60:
        assert len({tuple(order) for order in orders}) == 3
        # Neighbours are torn apart: an ordered walk has mean step 1, a random one about size / 3.
        steps = [abs(a - b) for a, b in zip(orders[0], orders[0][1:])]
        assert abs(sum(steps) / len(steps) - size / 3) < size / 10


def test_every_sample_of_a_block_is_visited_once_and_blocks_differ(dataset):
    stream = SampleStream(dataset, 5, 8, 1)
    first = [stream.visited(n) for n in range(stream.block)]
    second = [stream.visited(n) - stream.block for n in range(stream.block, 2 * stream.block)]
    assert sorted(first) == sorted(second) == list(range(stream.block)) and first != second
    assert first != [SampleStream(dataset, 6, 8, 1).visited(n) for n in range(stream.block)]


def test_batches_are_int64_tensors(dataset):
    stream = SampleStream(dataset, 5, 8, 2)
    tokens, documents = stream.batch(3, 4)
    assert tokens.dtype == documents.dtype == torch.int64 and tokens.shape == documents.shape == (4, 11)
    for row in range(4):
        assert tokens[row].tolist() == stream.sample(stream.visited(3 + row))[0].tolist()
        assert documents[row].tolist() == stream.sample(stream.visited(3 + row))[1].tolist()
    with pytest.raises(IndexError):
        stream.sample(-1)


def test_too_little_training_text_says_how_much_is_needed(dataset):
    SampleStream(dataset, 0, TOKENS - 3, 2)
    with pytest.raises(InputError, match=f"{TOKENS} tokens found, one sample needs {TOKENS + 1}"):
        SampleStream(dataset, 0, TOKENS - 2, 2)


@pytest.mark.parametrize("length, depth", [(1, 0), (8, 1), (13, 4), (TOKENS - 1, 0), (TOKENS, 2), (500, 1)])
def test_evaluation_predicts_every_token_but_the_first_once(dataset, length, depth):
    windows = EvalWindows(dataset, length, depth)
    tokens, documents = windows.batch(0, len(windows))
    assert tokens.shape == (len(windows), length + 1 + depth)
    targets, of = tokens[:, 1 : length + 1].flatten(), documents[:, 1 : length + 1].flatten()
    assert targets[of >= 0].tolist() == list(range(1, TOKENS))
    assert (documents[:, 0] == 0).all() and (of.view(len(windows), -1)[:, 0] >= 0).all()  # no window without a target
    for i in range(len(windows)):
        place = torch.arange(i * length, i * length + length + 1 + depth)
        real = place < TOKENS
        assert tokens[i].tolist() == torch.where(real, place, 0).tolist()
        numbers = documents[i][real].numpy()
        own = DOCUMENT_OF[place[real]]
        assert numbers.tolist() == np.unique(own, return_inverse=True)[1].tolist()
        assert (documents[i][~real] == -1).all()
    with pytest.raises(IndexError):
        windows.sample(len(windows))


def test_evaluation_needs_a_target(tmp_path):
    megatron_format.write(tmp_path / "a", [[[5]]])
    with pytest.raises(InputError, match="1 tokens found.*at least 2"):
        EvalWindows(IndexedDataset(tmp_path / "a"), 8, 1)


def test_documents_with_equal_tokens_still_count_apart(tmp_path):
    """A set of one document, epoch after epoch: the same text again is another document."""
    megatron_format.write(tmp_path / "a", [[[4, 5, 6]]])
    tokens, documents = SampleStream(IndexedDataset(tmp_path / "a"), 0, 2, 0).sample(1)
    assert tokens.tolist() == [6, 4, 5] and documents.tolist() == [0, 1, 1]


def test_ids_beyond_the_vocabulary_are_named():
    """D01."""
    tokens = torch.tensor([[0, 5, 9], [3, 10, 2]])
    check_ids(tokens, 11, "training data")
    with pytest.raises(InputError, match="training data: token id 10 in sample 41 at position 1, .*0 … 9"):
        check_ids(tokens, 10, "training data", first=40)
    with pytest.raises(InputError, match="token id -1 in sample 0"):
        check_ids(torch.tensor([[-1]]), 10, "training data")


def sparse_dataset(prefix, count):
    """`count` documents of 300 tokens; the tokens are a hole in the file."""
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, count, count + 1))
        file.write(np.full(count, 300, "<i4").tobytes())
        file.write((np.arange(count, dtype="<i8") * 300 * 4).tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(count * 300 * 4)


def calls_of(action):
    """How many functions Python calls in action()."""
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def test_no_step_in_python_for_each_document(tmp_path):
    """A million documents start, and give their samples, in as many calls as two thousand. tools/bench_data.py has times."""
    found = []
    for count in (2_000, 1_000_000):
        sparse_dataset(tmp_path / str(count), count)
        streams = []
        start = calls_of(lambda: streams.append(SampleStream(IndexedDataset(tmp_path / str(count)), 1, 128, 1)))
        first, others = (calls_of(lambda: [streams[0].sample(i) for i in some]) for some in ([0], range(1, 11)))
        found.append((start, first, others))
    small, large = np.array(found)
    assert (small > 0).all() and (large < 2 * small + 100).all(), found
