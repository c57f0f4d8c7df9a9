"""The tensor part of a checkpoint: torch.distributed.checkpoint (DCP) over safetensors files.

Why DCP's Hugging Face storage and not its default one: the default storage keeps its index in a pickle, `.metadata`,
and reading a checkpoint executes whatever that file says. The safetensors storage has no pickle and no index: the
header of a file is JSON with names, dtypes, shapes and the offset of each piece in its global tensor. It was tried on
every dtype that a run holds (also float8, bool, 0-d and empty tensors, NaN and -0.0: all bit-exact) and on pieces of
one global tensor written by two ranks and read by one, or by two in another layout; the tests keep both.

Habits of it that shape this file, and matter to whoever saves from several ranks:

- a file is built in memory before it is written, so tensors are spread over files of about FILE_BYTES;
- a writer thread other than the first loses its exceptions, so there is one;
- a file holds one piece of a tensor: a rank that owns two ranges of one tensor must put them into two files;
- a global shape is the extent of the pieces found: a lost last file makes a tensor shorter, and loading it an error.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from dstrain.checkpoint.files import TENSORS, CorruptCheckpoint, require_complete
from dstrain.checkpoint.progress import byte_progress
from dstrain.config.errors import InputError

FILE_BYTES = 2**30

# Saving and loading by one process is what is meant here, not an accident to be told about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes CPU tensors of any shape and dtype as safetensors files into `folder/tensors`, and syncs the files.

    Raises what the writing raised, OSError where the disk is full.
    """
    writer = HuggingFaceStorageWriter(
        str(folder / TENSORS), fqn_to_index_mapping=_file_numbers(tensors), save_distributed=True
    )
    # The tensors are in host memory already: copy-ahead would only make this thread open a CUDA context on device 0.
    writer.per_thread_copy_ahead = 0
    try:
        dcp.save(
            dict(tensors), storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True
        )
    except CheckpointException as error:
        raise _cause(error) from None


def tensor_names(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (global shape, dtype) of every tensor of the complete checkpoint `path`, read from the headers alone."""
    require_complete(path)
    try:
        index = HuggingFaceStorageReader(str(path / TENSORS)).read_metadata().state_dict_metadata
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptCheckpoint(f"checkpoint {path}: {TENSORS}: {error}") from error
    for name, entry in index.items():
        if sum(piece.sizes.numel() for piece in entry.chunks) != entry.size.numel():
            raise CorruptCheckpoint(f"checkpoint {path}: {TENSORS}: the pieces of {name} do not cover it")
    return {name: (tuple(entry.size), entry.properties.dtype) for name, entry in sorted(index.items())}


def load_tensors(path: Path, into: dict[str, Tensor], prefixes: Sequence[str] = ("",)) -> None:
    """Fills the tensors of `into` in place with those of the checkpoint `path`, on whatever device they are.

    The names of `into` must be exactly the checkpoint's names that begin with one of `prefixes` (default: all of them),
    of the same shape and dtype. Otherwise InputError names the checkpoint and the first keys, and nothing was loaded.
    Checksums are not looked at: that is `verify`.
    """
    saved = {name: entry for name, entry in tensor_names(path).items() if name.startswith(tuple(prefixes))}
    _require_same(path, saved, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in into.items()})
    for name, tensor in into.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: it has no memory to load into")

    with byte_progress(f"loading {path.name}", sum(tensor.nbytes for tensor in into.values())) as advance:
        try:
            dcp.load(
                dict(into),
                storage_reader=HuggingFaceStorageReader(str(path / TENSORS)),
                planner=_Planner(advance),
                no_dist=True,
            )
        except CheckpointException as error:
            raise CorruptCheckpoint(f"checkpoint {path}: {TENSORS}: {_cause(error)}") from error


class _Planner(DefaultLoadPlanner):
    """DCP's own planner for a flat dictionary, which tells how far the reading is."""

    def __init__(self, advance):
        super().__init__(flatten_state_dict=False)
        self.advance = advance

    def commit_tensor(self, read_item, tensor):
        self.advance(tensor.nbytes)


def _cause(error: CheckpointException) -> BaseException:
    """The exception of the first rank that failed: DCP's own is a BaseException with a traceback for its text."""
    return next(iter(error.failures.values()))[0]


def _file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Name -> number of its file, from 1: tensors in their order, a new file when FILE_BYTES would be exceeded."""
    numbers, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += tensor.nbytes
    return numbers


def _require_same(path: Path, saved: dict, wanted: dict) -> None:
    differ = [
        f"{name}: {_kind(saved[name])} there, {_kind(wanted[name])} here"
        for name in sorted(saved.keys() & wanted.keys())
        if saved[name] != wanted[name]
    ]
    faults = [
        _some("missing there", sorted(wanted.keys() - saved.keys())),
        _some("unknown here", sorted(saved.keys() - wanted.keys())),
        _some("of another shape or dtype", differ),
    ]
    if any(faults):
        raise InputError(f"checkpoint {path} does not hold the tensors asked for: {'; '.join(filter(None, faults))}")


def _some(what: str, items: list[str], shown: int = 3) -> str:
    if not items:
        return ""
    more = f", and {len(items) - shown} more" if len(items) > shown else ""
    return f"{len(items)} tensor{'s' if len(items) > 1 else ''} {what} ({', '.join(items[:shown])}{more})"


def _kind(entry: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{str(entry[1]).removeprefix('torch.')}{list(entry[0])}"
