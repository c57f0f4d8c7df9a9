"""Token files: the format against a second implementation, large ids and files, damaged files."""

import os
import pickle
import struct

import numpy as np
import pytest

import megatron_format
from dstrain.config.errors import InputError
from dstrain.data.indexed import IndexedDataset, IndexedWriter

DOCUMENTS = [[0, 1, 2], [], [128815, 65536, 65535], [2**31 - 1], list(range(500, 600))]


def write(prefix, documents=DOCUMENTS):
    with IndexedWriter(prefix) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_an_independent_reader_finds_what_was_written(tmp_path):
    """D01: the right values are the ids given; 128815 would come back as 63279 from 16 bits."""
    documents, code = megatron_format.read(write(tmp_path / "a"))
    assert documents == DOCUMENTS
    assert code == 4  # int32 whatever the largest id


def test_written_files_read_back(tmp_path):
    data = IndexedDataset(write(tmp_path / "a"))
    assert (data.num_documents, data.num_tokens) == (5, 107)
    assert data.document_lengths.tolist() == [3, 0, 3, 1, 100] and data.document_lengths.dtype == np.int64
    assert [data.document(i).tolist() for i in range(5)] == DOCUMENTS
    assert data.document(2).dtype == np.int64
    assert data.read(4, 10, 5).tolist() == [510, 511, 512, 513, 514]
    for wrong in [(4, 96, 5), (4, -1, 2), (5, 0, 1), (-1, 0, 1)]:
        with pytest.raises(IndexError):
            data.read(*wrong)


@pytest.mark.parametrize("code, largest", [(1, 255), (2, 127), (3, 32767), (4, 2**31 - 1), (5, 2**40), (8, 65535)])
def test_every_integer_type_of_a_foreign_writer_is_read(tmp_path, code, largest):
    megatron_format.write(tmp_path / "a", [[[1, largest]], [[largest, 3, 4]]], code)
    data = IndexedDataset(tmp_path / "a")
    assert [data.document(i).tolist() for i in range(2)] == [[1, largest], [largest, 3, 4]]


def test_a_document_of_several_sequences_is_read_across_them(tmp_path):
    documents = [[[1, 2], [], [3]], [], [[], [4, 5, 6], [7]]]
    megatron_format.write(tmp_path / "a", documents, code=8)
    data = IndexedDataset(tmp_path / "a")
    flat = [[1, 2, 3], [], [4, 5, 6, 7]]
    assert data.document_lengths.tolist() == [3, 0, 4]
    for i, ids in enumerate(flat):
        for start in range(len(ids) + 1):
            for end in range(start, len(ids) + 1):
                assert data.read(i, start, end - start).tolist() == ids[start:end]


def test_sequences_stored_in_another_order_are_found_by_their_pointers(tmp_path):
    megatron_format.write(tmp_path / "a", [[[1, 2]], [[3, 4]]])
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<2q", raw, 34 + 8, 8, 0)  # swap the two pointers
    (tmp_path / "a.idx").write_bytes(raw)
    data = IndexedDataset(tmp_path / "a")
    assert [data.document(i).tolist() for i in range(2)] == [[3, 4], [1, 2]]


def test_positions_beyond_4_gib_are_not_cut_to_32_bits(tmp_path):
    """D02: one hole of 2^31 - 8 ids (8 GiB), then known ids; token 2^31 and byte 2^33 overflow 32 bits."""
    hole, tail = 2**31 - 8, list(range(1, 33))
    lengths = [hole, len(tail)]
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(4 * hole)
        file.write(struct.pack("<32i", *tail))
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3))
        file.write(struct.pack("<2i2q3q", *lengths, 0, 4 * hole, 0, 1, 2))
    data = IndexedDataset(tmp_path / "a")
    assert data.num_tokens == 2**31 + 24
    assert data.document(1).tolist() == tail
    assert data.read(0, hole - 3, 3).tolist() == [0, 0, 0]


def test_positions_beyond_4_gib_are_written_whole(tmp_path):
    """D02: lengths as of documents near 2^31 ids, whose tokens nobody writes; byte 2^33 overflows 32 bits."""
    writer = IndexedWriter(tmp_path / "a")
    writer._lengths.extend([2**31 - 8, 5, 2**31 - 1, 3])
    writer._document_index.extend([1, 2, 3, 4])
    writer.finish()
    raw = (tmp_path / "a.idx").read_bytes()
    assert struct.unpack_from("<4q", raw, 34 + 16) == (0, 4 * (2**31 - 8), 4 * (2**31 - 3), 4 * (2**32 - 4))


def test_files_are_appended_with_their_documents(tmp_path):
    """Documents of several sequences, empty ones and empty files keep their borders."""
    megatron_format.write(tmp_path / "a", [[[1, 2], [3]], [], [[4]]])
    write(tmp_path / "b", [])
    with IndexedWriter(tmp_path / "c") as writer:
        for name in ("a", "b", "a"):
            writer.append(tmp_path / name)
        writer.add_document([9])
    assert megatron_format.read(tmp_path / "c")[0] == 2 * [[1, 2, 3], [], [4]] + [[9]]
    megatron_format.write(tmp_path / "d", [[[1]]], code=8)
    with pytest.raises(InputError, match="d.idx: uint16 ids"), IndexedWriter(tmp_path / "c") as writer:
        writer.append(tmp_path / "d")


def test_a_gap_before_the_first_sequence_is_allowed(tmp_path):
    megatron_format.write(tmp_path / "a", [[[7, 8]]], gap=2**32 + 4)
    assert IndexedDataset(tmp_path / "a").document(0).tolist() == [7, 8]


def damage(tmp_path, change):
    """Write good files, let `change` edit {'idx': bytearray, 'bin': bytearray}, return the error of opening them."""
    write(tmp_path / "a")
    raw = {end: bytearray((tmp_path / f"a.{end}").read_bytes()) for end in ("idx", "bin")}
    change(raw)
    for end, content in raw.items():
        (tmp_path / f"a.{end}").write_bytes(content)
    with pytest.raises(InputError) as error:
        IndexedDataset(tmp_path / "a")
    assert "\n" not in str(error.value)
    return str(error.value)


def put(end, offset, form, value):
    return lambda raw: struct.pack_into(form, raw[end], offset, value)


# Good files: 107 ids of 4 bytes; 34 bytes of header, 5 sequences, 6 document entries: 34 + 60 + 48 bytes of index.
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda raw: raw["bin"].__delitem__(slice(-4, None)), ["a.bin", "424 bytes", "428"]),
        (lambda raw: raw["bin"].extend(b"xx"), ["a.bin", "430 bytes", "428"]),
        (lambda raw: raw["bin"].clear(), ["a.bin", "0 bytes", "428"]),
        (lambda raw: raw["idx"].__delitem__(slice(-1, None)), ["a.idx", "141 bytes", "142"]),
        (lambda raw: raw["idx"].extend(b"12345"), ["a.idx", "147 bytes", "142"]),
        (lambda raw: raw["idx"].__delitem__(slice(20, None)), ["a.idx", "20 bytes", "34"]),
        (lambda raw: raw["idx"].clear(), ["a.idx", "not a Megatron"]),
        (put("idx", 0, "<B", 65), ["a.idx", "not a Megatron"]),
        (put("idx", 9, "<Q", 2), ["a.idx", "version 2", "expected 1"]),
        (put("idx", 17, "<B", 7), ["a.idx", "code 7", "int32"]),
        (put("idx", 17, "<B", 99), ["a.idx", "code 99", "int32"]),
        (put("idx", 18, "<Q", 2**60), ["a.idx", "142", "expected"]),
        (put("idx", 34, "<i", -3), ["a.idx", "negative"]),
        (put("idx", 54, "<q", -4), ["a.idx", "negative"]),
        (put("idx", 86, "<q", 402), ["a.idx", "multiple of the 4 bytes"]),
        (put("idx", 86, "<q", 2**63 - 8), ["a.idx", "428 bytes", "9223372036854775800"]),
        (put("idx", 94, "<q", 1), ["a.idx", "document index"]),
        (put("idx", 94 + 16, "<q", 5), ["a.idx", "document index"]),
        (put("idx", 94 + 40, "<q", 9), ["a.idx", "document index"]),
    ],
)
def test_damaged_files_are_refused_with_file_found_and_expected(tmp_path, change, words):
    message = damage(tmp_path, change)
    assert all(word in message for word in words), message


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InputError, match="a.idx: no such file"):
        IndexedDataset(tmp_path / "a")
    write(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(InputError, match="a.bin: no such file"):
        IndexedDataset(tmp_path / "a")


def test_files_without_documents_open(tmp_path):
    data = IndexedDataset(write(tmp_path / "a", []))
    assert (data.num_documents, data.num_tokens) == (0, 0)


def test_an_abandoned_writer_leaves_no_final_names_and_spoils_no_older_files(tmp_path):
    writer = IndexedWriter(tmp_path / "a")
    writer.add_document([1, 2])
    assert not (tmp_path / "a.bin").exists() and not (tmp_path / "a.idx").exists()
    writer.abandon()
    write(tmp_path / "a")
    with pytest.raises(RuntimeError, match="stop"):
        with IndexedWriter(tmp_path / "a") as writer:
            writer.add_document([1, 2])
            raise RuntimeError("stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert IndexedDataset(tmp_path / "a").num_tokens == 107


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1, 2]]])
def test_what_is_no_row_of_int32_ids_is_refused(tmp_path, ids):
    with pytest.raises(InputError):
        with IndexedWriter(tmp_path / "a") as writer:
            writer.add_document(ids)
    assert not list(tmp_path.iterdir())


def test_a_pickled_dataset_carries_no_tokens(tmp_path):
    """Worker processes map the files again instead of receiving a copy."""
    data = IndexedDataset(write(tmp_path / "a", [list(range(100_000))]))
    packed = pickle.dumps(data)
    assert len(packed) < 1000
    assert pickle.loads(packed).read(0, 99_990, 3).tolist() == [99_990, 99_991, 99_992]


def test_only_the_wanted_ids_are_read_in_as_many_calls_as_it_takes(tmp_path, monkeypatch):
    """A system reads some 2 GiB in one call; this one seven bytes."""
    data, plain, asked = IndexedDataset(write(tmp_path / "a", [list(range(1000))])), os.preadv, []

    def preadv(file, buffers, position):
        asked.append((position, len(buffers[0])))
        return plain(file, [buffers[0][:7]], position)

    monkeypatch.setattr(os, "preadv", preadv)
    assert data.read(0, 500, 20).tolist() == list(range(500, 520))
    assert asked == [(2000 + 7 * i, 80 - 7 * i) for i in range(12)]


def test_a_file_that_is_cut_off_meanwhile_is_named(tmp_path):
    data = IndexedDataset(write(tmp_path / "a", [list(range(1000))]))
    os.truncate(tmp_path / "a.bin", 2400)
    assert data.read(0, 590, 10).tolist() == list(range(590, 600))
    with pytest.raises(InputError, match=r"a\.bin: ends at byte 2400, expected 4000 bytes as when it was opened"):
        data.read(0, 590, 11)
