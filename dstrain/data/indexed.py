"""Token files in Megatron's indexed format: `PREFIX.bin` holds raw token ids, `PREFIX.idx` says where documents lie.

Layout of `.idx`, little-endian: magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequence count S, u64 length D
of the document index, int32[S] sequence lengths, int64[S] byte positions of the sequences in `.bin`, int64[D] document
index. Document i is made of the sequences `index[i] … index[i + 1] - 1`; the index starts with 0, so there are D - 1
documents.
"""

import os
import secrets
import shutil
import struct
import weakref
from array import array
from pathlib import Path

import numpy as np

from dstrain.config.errors import InputError
from dstrain.data.starts import AT_ONCE, Starts

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
INT32_CODE = 4
LARGEST_ID = 2**31 - 1  # of an int32, and of a sequence's length


def _file_size(path: Path) -> int:
    if not path.is_file():
        raise InputError(f"{path}: no such file; token files are a pair PREFIX.bin and PREFIX.idx, named by PREFIX")
    return path.stat().st_size


class IndexedDataset:
    """Read-only documents of token ids; the index is memory-mapped, ids are read where they are wanted.

    Opening checks header and sizes and raises InputError naming the file, what was found and what was expected. The .bin
    is not mapped: the system would read ahead at every document, megabytes on some disks, with Python's lock held, and a
    file that is cut off meanwhile would end the process.
    All positions are int64, so files beyond 4 GiB and 2^31 tokens work. Of a set whose documents are single sequences
    no array as long as the index is made: there may be hundreds of millions of documents.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        idx_size, bin_size = _file_size(self.idx_path), _file_size(self.bin_path)
        dtype, sequences, entries = self._read_header(idx_size)

        # Plain arrays over the map: slices of a memmap object cost microseconds each.
        arrays = np.asarray(np.memmap(self.idx_path, np.uint8, "r", offset=HEADER.size))
        after_lengths, after_pointers = 4 * sequences, 12 * sequences
        self._lengths = arrays[:after_lengths].view("<i4")
        self._pointers = arrays[after_lengths:after_pointers].view("<i8")
        self._document_index = arrays[after_pointers:].view("<i8")
        single = self._check_arrays(np.dtype(dtype).itemsize, bin_size)

        self._starts = Starts(sequences, self._lengths.__getitem__)  # token counts before each sequence
        self._document_lengths = self._lengths if single else self._sums_of_documents()
        self.num_documents = entries - 1
        self.num_tokens = self._starts.total
        self.dtype = np.dtype(dtype)
        self.size = bin_size // self.dtype.itemsize  # ids in the .bin
        self._bin = os.open(self.bin_path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._bin)

    def __reduce__(self):
        # A worker process opens the files again: pickling a memory map would copy it whole.
        return IndexedDataset, (self.prefix,)

    def _read_header(self, idx_size: int) -> tuple[type, int, int]:
        path = self.idx_path
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        if not head.startswith(MAGIC):
            raise InputError(f"{path}: not a Megatron token index: starts with {head[:9]!r}, expected {MAGIC!r}")
        if len(head) < HEADER.size:
            raise InputError(f"{path}: truncated: {idx_size} bytes found, expected at least {HEADER.size}")
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != VERSION:
            raise InputError(f"{path}: index version {version} found, expected {VERSION}")
        if code not in DTYPES or not np.issubdtype(DTYPES[code], np.integer):
            valid = ", ".join(f"{c} ({t.__name__})" for c, t in DTYPES.items() if np.issubdtype(t, np.integer))
            raise InputError(f"{path}: dtype code {code} found, token ids need one of {valid}")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if idx_size != expected:
            raise InputError(
                f"{path}: {idx_size} bytes found, expected {expected} "
                f"for {sequences} sequences and {entries} document entries"
            )
        if entries == 0:
            raise InputError(f"{path}: 0 document entries found, expected at least the leading 0")
        return DTYPES[code], sequences, entries

    def _check_arrays(self, itemsize: int, bin_size: int) -> bool:
        """InputError where the index contradicts itself or the .bin. -> whether every document is one sequence."""
        index, path, sequences = self._document_index, self.idx_path, len(self._lengths)
        single, rising = len(index) == sequences + 1, True
        for first in range(0, len(index) - 1, AT_ONCE):
            part = index[first : first + AT_ONCE + 1]
            single = single and bool((part[1:] > part[:-1]).all())
            rising = rising and (single or bool((part[1:] >= part[:-1]).all()))
        if index[0] != 0 or index[-1] != sequences or not rising:
            raise InputError(f"{path}: corrupt document index: expected rising values from 0 to {sequences}")
        expected = 0
        for first in range(0, sequences, AT_ONCE):
            lengths, pointers = (array[first : first + AT_ONCE] for array in (self._lengths, self._pointers))
            if lengths.min() < 0 or pointers.min() < 0:
                raise InputError(
                    f"{path}: corrupt: negative sequence length or byte position found, expected 0 or more"
                )
            if np.any(pointers & (itemsize - 1)):  # of a power of two; a remainder takes ten times as long
                raise InputError(
                    f"{path}: corrupt: a byte position is no multiple of the {itemsize} bytes of a token id"
                )
            if pointers.max() > 2**62:  # the sum below would overflow
                raise InputError(f"{path}: corrupt: byte position {pointers.max()} found, {bin_size} bytes are there")
            expected = max(expected, int((pointers + lengths * np.int64(itemsize)).max()))
        if bin_size != expected:
            raise InputError(f"{self.bin_path}: {bin_size} bytes found, expected {expected} from {path.name}")
        return single

    def _sums_of_documents(self) -> np.ndarray:
        starts = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths, dtype=np.int64, out=starts[1:])
        return np.diff(starts[self._document_index])

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens of every document, int64 [documents], made anew; `lengths` is the way to some of them."""
        return self.lengths(slice(None))

    def lengths(self, documents: slice | np.ndarray) -> np.ndarray:
        """Tokens of these documents, int64."""
        return self._document_lengths[documents].astype(np.int64)

    def length(self, document: int) -> int:
        """Tokens of one document."""
        return int(self._document_lengths[document])

    def document(self, i: int) -> np.ndarray:
        """All token ids of document i, int64."""
        return self.read(i, 0, self.length(i))

    def sequences(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of all sequences, and the document index, both int64."""
        return self._lengths.astype(np.int64), self._document_index

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """`length` token ids of a document from its token `offset` on, int64 [length]; IndexError beyond its end."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"{self.prefix}: document {document} of {self.num_documents}")
        if offset < 0 or length < 0 or offset + length > self.length(document):
            raise IndexError(
                f"{self.prefix}: tokens {offset}:{offset + length} of document {document}, "
                f"which has {self.length(document)}"
            )
        out = np.empty(length, np.int64)
        if self._document_lengths is self._lengths:
            sequence, inside = document, offset
        else:
            position = self._starts[int(self._document_index[document])] + offset
            sequence, start = self._starts.find(position)
            inside = position - start
        done = 0
        while done < length:
            take = min(length - done, int(self._lengths[sequence]) - inside)
            first = int(self._pointers[sequence]) // self.dtype.itemsize + inside
            out[done : done + take] = self.ids(first, take)
            done, sequence, inside = done + take, sequence + 1, 0
        return out

    def ids(self, first: int, count: int) -> np.ndarray:
        """`count` ids of the .bin from its id `first` on, whatever document they are of; of type `dtype`.

        InputError if the file has become shorter since it was opened.
        """
        found = np.empty(count, self.dtype)
        rest, position = memoryview(found).cast("B") if count else b"", first * self.dtype.itemsize
        while rest:  # one call reads 2 GiB at most
            read = os.preadv(self._bin, [rest], position)
            if read == 0:
                raise InputError(f"{self.bin_path}: ends at byte {position}, expected {self.size * self.dtype.itemsize} "
                                 "bytes as when it was opened: token files must not change while they are read")
            rest, position = rest[read:], position + read
        return found


class IndexedWriter:
    """Writes documents as int32 ids. The final names appear only in `finish()`, complete and flushed to the disk.

    As a context manager it finishes on a clean exit, and on an exception removes its temporary files.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        mark = f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._bin_temp, self._idx_temp = self.prefix + ".bin" + mark, self.prefix + ".idx" + mark
        self._lengths = array("q")  # eight bytes each: there may be hundreds of millions
        self._document_index = array("q", [0])
        self._bin = open(self._bin_temp, "xb")

    def add_document(self, ids) -> None:
        """Append one document: a list or integer array of ids in 0 … 2^31 - 1. It may be empty."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
            raise InputError(f"{self.prefix}: a document is one row of integer ids, not {ids.dtype} {list(ids.shape)}")
        if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_ID):
            raise InputError(f"{self.prefix}: token ids {ids.min()} … {ids.max()}, valid are 0 … {LARGEST_ID}")
        self._bin.write(ids.astype("<i4").tobytes())
        # The format stores a sequence's length as int32; a longer document becomes several sequences.
        for start in range(0, max(len(ids), 1), LARGEST_ID):
            self._lengths.append(min(len(ids) - start, LARGEST_ID))
        self._document_index.append(len(self._lengths))

    def append(self, prefix: str | Path) -> None:
        """Append all documents of files that such a writer made."""
        data = IndexedDataset(prefix)
        if data.dtype != np.dtype("<i4"):
            raise InputError(f"{data.idx_path}: {data.dtype} ids, int32 can be appended")
        with open(data.bin_path, "rb") as file:
            shutil.copyfileobj(file, self._bin, 1 << 24)
        lengths, index = data.sequences()
        self._document_index.frombytes((index[1:] + len(self._lengths)).astype(np.int64).tobytes())
        self._lengths.frombytes(lengths.tobytes())

    def finish(self) -> None:
        """Write the index, flush both files to the disk and give them their final names."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        lengths = np.frombuffer(self._lengths, np.int64)
        pointers = 4 * (np.cumsum(lengths) - lengths)
        with open(self._idx_temp, "xb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, INT32_CODE, len(lengths), len(self._document_index)))
            idx.write(lengths.astype("<i4").tobytes())
            idx.write(pointers.astype("<i8").tobytes())
            idx.write(np.frombuffer(self._document_index, np.int64).astype("<i8").tobytes())
            idx.flush()
            os.fsync(idx.fileno())
        # An older index goes first: no moment shows an index beside another dataset's tokens.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        os.replace(self._bin_temp, self.prefix + ".bin")
        os.replace(self._idx_temp, self.prefix + ".idx")
        folder = os.open(Path(self.prefix).parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def abandon(self) -> None:
        """Remove the temporary files; the final names stay untouched."""
        self._bin.close()
        for path in (self._bin_temp, self._idx_temp):
            Path(path).unlink(missing_ok=True)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()
