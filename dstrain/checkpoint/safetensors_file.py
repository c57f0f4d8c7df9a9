"""Writing safetensors files piece by piece: the header first, then each tensor's bytes at their place.

The library writes a file from tensors that are all in memory; here no more than one of them has to be. The format:
8 bytes with the header's length, the header as JSON (name -> dtype, shape, range of bytes), the bytes of the tensors.
"""

import json
import os
from pathlib import Path

import torch

CHUNK = 2**22  # bytes that are hashed and written while they are in the cache
WRITEBACK = 2**25  # bytes after which the disk is told to begin, and not only when the file is closed

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TensorKinds = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


def nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


class SafetensorsWriter:
    """A safetensors file of the given tensors; each is then written whole, or in pieces of its leading dimension."""

    def __init__(self, path: Path, tensors: TensorKinds, metadata: dict[str, str] | None = None, state=None):
        """state: one of hashlib's, which gets the bytes of the file; then tensors come in the order of `names`."""
        header: dict = {"__metadata__": {"format": "pt", **(metadata or {})}}  # "pt" is what transformers requires
        self._begins: dict[str, int] = {}
        self._missing: dict[str, int] = {}  # bytes not written yet
        end = 0
        # The library demands alignment of its own files: wide types first keep every tensor aligned.
        for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
            size = nbytes(shape, dtype)
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._begins[name], self._missing[name] = end, size
            end += size
        self.names = list(self._begins)  # in the order of the file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self.size = self._data + end  # bytes of the file
        self._tensors, self._state = tensors, state
        self._place = self._told = 0  # behind the last byte written; behind the last that the disk was told of
        self._file = open(path, "wb", buffering=0)
        self._put(0, memoryview(len(text).to_bytes(8, "little") + text))
        self._file.truncate(self.size)

    @staticmethod
    def header_bytes(name: str) -> int:
        """An upper bound of what a tensor adds to the header."""
        return len(json.dumps(name)) + 128

    def write(self, name: str, tensor: torch.Tensor, index: int | None = None) -> None:
        """The tensor, or with an index the slice `index` of its leading dimension; of the declared type and shape."""
        shape, dtype = self._tensors[name]
        wanted = shape if index is None else shape[1:]
        if tuple(tensor.shape) != wanted or tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} does not belong there")
        begin = self._begins[name] + (0 if index is None else index * tensor.nbytes)
        flat = tensor.detach().cpu().contiguous().view(-1)
        self._put(self._data + begin, flat.view(torch.uint8).numpy().data)
        self._missing[name] -= tensor.nbytes

    def _put(self, begin: int, data: memoryview) -> None:
        if begin != self._place:
            if self._state is not None:
                raise ValueError(f"byte {begin} after byte {self._place}: the checksum follows the file's order")
            self._file.seek(begin)
            self._place = self._told = begin
        while data:
            chunk = data[:CHUNK]
            if self._state is not None:
                self._state.update(chunk)
            while chunk:  # a write may take less than it is given
                taken = self._file.write(chunk)
                self._place, chunk, data = self._place + taken, chunk[taken:], data[taken:]
            if self._place - self._told >= WRITEBACK:
                # Linux begins to write these pages; they are dirty, so none of them is dropped.
                os.posix_fadvise(self._file.fileno(), self._told, self._place - self._told, os.POSIX_FADV_DONTNEED)
                self._told = self._place

    def close(self) -> None:
        """Forces the file to the disk; ValueError if a tensor was not written."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise ValueError(f"tensors not or not wholly written: {missing[:3]}")
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
