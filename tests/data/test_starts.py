"""Sums of which only some are kept; the right values are NumPy's sums of all lengths."""

import struct
import tracemalloc

import numpy as np
import pytest

import megatron_format
from dstrain.config.errors import InputError
from dstrain.data import indexed, samples
from dstrain.data import starts as module
from dstrain.data.indexed import HEADER, MAGIC, IndexedDataset
from dstrain.data.samples import SampleStream, shuffled
from dstrain.data.starts import BLOCK, Starts


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 1000])
@pytest.mark.parametrize("largest", [0, 1, 3, 2**31 - 1])
def test_every_start_and_every_position_is_found(count, largest, monkeypatch):
    """Among pieces of no length the last one is meant: the one that holds the position."""
    monkeypatch.setattr(module, "AT_ONCE", 2 * BLOCK)
    lengths = np.random.default_rng(count).integers(0, largest, count, np.int32, endpoint=True)
    lengths[count // 3 : count // 3 + 150] = 0  # whole blocks of nothing
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    starts = Starts(count, lengths.__getitem__)
    assert starts.total == sums[-1] and [starts[i] for i in range(count + 1)] == sums.tolist()
    places = np.unique(np.concatenate([sums, np.maximum(sums - 1, 0), sums + 1, sums + largest // 2]))
    for position in places.tolist():
        piece = int(np.searchsorted(sums, position, side="right")) - 1
        assert starts.find(position) == (piece, sums[piece])


def test_a_start_takes_few_bytes_a_document(tmp_path):
    """The keys of the order while it is drawn, 8 bytes, and the order, 4: 10 million documents take 120 MB, not 700."""
    count, length = 400_000, 300
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, count, count + 1))
        file.write(np.full(count, length, "<i4").tobytes())
        file.write((np.arange(count, dtype="<i8") * length * 4).tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(count * length * 4)
    tracemalloc.start()
    try:
        stream = SampleStream(IndexedDataset(tmp_path / "a"), 1, 256, 1)
        stream.sample(0)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    fixed = 10 * 2**20  # arrays of AT_ONCE documents
    assert peak - fixed < 13 * count and held < 5 * count


def test_samples_of_documents_of_several_sequences_equal_those_of_single_ones(tmp_path):
    """The same documents stored both ways are the same samples."""
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 1000, draw.integers(0, 40)).tolist() for _ in range(500)]
    megatron_format.write(tmp_path / "single", [[document] for document in documents])
    megatron_format.write(tmp_path / "cut", [[d[:3], [], d[3:9], d[9:]] for d in documents])
    single, cut = (IndexedDataset(tmp_path / name) for name in ("single", "cut"))
    assert cut.document_lengths.tolist() == single.document_lengths.tolist() == [len(d) for d in documents]
    a, b = (SampleStream(dataset, 3, 16, 2) for dataset in (single, cut))
    for i in range(0, 900, 7):
        for got, right in zip(b.sample(i), a.sample(i)):
            assert got.tolist() == right.tolist()


def test_an_empty_document_is_none_of_the_single_ones(tmp_path):
    """Two documents and two sequences, but the first has both."""
    megatron_format.write(tmp_path / "a", [[[1, 2], [3]], []])
    data = IndexedDataset(tmp_path / "a")
    assert data.document_lengths.tolist() == [3, 0]
    assert data.document(0).tolist() == [1, 2, 3] and data.document(1).tolist() == []


@pytest.mark.parametrize("at_once", [1, 3, 10, 64])
def test_what_is_done_in_parts_does_not_depend_on_their_size(monkeypatch, at_once):
    """The order of 10 documents is written down in test_samples; that of 1000 is compared with one in a single part."""
    whole = shuffled(1000, 5, 2)
    monkeypatch.setattr(samples, "AT_ONCE", at_once)
    assert shuffled(10, 1234, 0).tolist() == [5, 6, 3, 9, 7, 4, 1, 2, 8, 0]
    assert shuffled(1000, 5, 2).tolist() == whole.tolist()


@pytest.mark.parametrize("sequence", range(5))
@pytest.mark.parametrize("what, form, offset, size, words", [
    ("length", "<i", 34, 4, "negative"), ("pointer", "<q", 34 + 20, 8, "negative"),
    ("document", "<q", 34 + 60 + 8, 8, "rising"),
])
def test_damage_is_found_in_every_part_of_an_index(tmp_path, monkeypatch, sequence, what, form, offset, size, words):
    monkeypatch.setattr(indexed, "AT_ONCE", 2)
    megatron_format.write(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5]], [[6]], [[7, 8]]])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into(form, raw, offset + size * sequence, -4 if what != "document" else 77)
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(InputError, match=words):
        IndexedDataset(tmp_path / "a")
