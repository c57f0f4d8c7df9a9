"""A second reader and writer of Megatron's indexed format, by `struct` alone, from the format's description."""

import struct

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


def write(prefix, documents, code=4, gap=0):
    """`documents` is a list of documents, each a list of sequences of ids; `gap` bytes of nothing precede the ids."""
    lengths, pointers, index, body = [], [], [0], b""
    for sequences in documents:
        for ids in sequences:
            pointers.append(gap + len(body))
            lengths.append(len(ids))
            body += struct.pack(f"<{len(ids)}{CODES[code]}", *ids)
        index.append(len(lengths))
    with open(f"{prefix}.bin", "wb") as file:
        file.seek(gap)
        file.write(body)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(index)))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths))
        file.write(struct.pack(f"<{len(pointers)}q", *pointers))
        file.write(struct.pack(f"<{len(index)}q", *index))


def read(prefix):
    """The documents as flat lists of ids, and the dtype code."""
    with open(f"{prefix}.idx", "rb") as file:
        raw = file.read()
    with open(f"{prefix}.bin", "rb") as file:
        body = file.read()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", raw, 9)
    assert version == 1
    at = 34
    lengths = struct.unpack_from(f"<{sequences}i", raw, at)
    pointers = struct.unpack_from(f"<{sequences}q", raw, at + 4 * sequences)
    index = struct.unpack_from(f"<{entries}q", raw, at + 12 * sequences)
    assert len(raw) == at + 12 * sequences + 8 * entries
    documents = []
    for first, last in zip(index, index[1:]):
        ids = []
        for s in range(first, last):
            ids += struct.unpack_from(f"<{lengths[s]}{CODES[code]}", body, pointers[s])
        documents.append(ids)
    return documents, code
