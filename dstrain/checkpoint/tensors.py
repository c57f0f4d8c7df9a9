"""The tensor part of a checkpoint: safetensors files in the layout of torch.distributed.checkpoint (DCP).

Why DCP's Hugging Face storage and not its default one: the default storage keeps its index in a pickle, `.metadata`,
and reading a checkpoint executes whatever that file says. The safetensors storage has no pickle and no index: the
header of a file is JSON with names, dtypes, shapes and the offset of each piece in its global tensor. DCP reads what is
written here, and it was tried on every dtype that a run holds (also float8, bool, 0-d and empty tensors, NaN and -0.0:
all bit-exact) and on pieces of one global tensor written by several ranks and read by other layouts.

Files are written by `SafetensorsWriter`, which needs no copy of a file in memory and no agreement between ranks: DCP's
own planner knows pieces only as parts of even meshes. What this format asks of whoever writes and reads it:

- a file holds one piece of a tensor: a rank that has two ranges of one tensor must put them into two files;
- a global shape is the extent of the pieces found: a lost last file makes a tensor shorter, and loading it an error.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from dstrain.checkpoint.files import TENSORS, CorruptCheckpoint, Sums, new_digest, require_complete, sums_entry
from dstrain.checkpoint.in_threads import in_threads
from dstrain.checkpoint.progress import byte_progress
from dstrain.checkpoint.safetensors_file import SafetensorsWriter
from dstrain.config.errors import InputError

FILE_BYTES = 2**30  # tensors are spread over files of about this size
LEAST_FILE_BYTES = 2**26  # below this a file is not worth a thread
WRITERS = 2  # files that a rank writes at once: a checksum takes as long as its write, so one hides the other
SHARDING = "DCP_SHARDING_INFO"  # DCP's key in a file's metadata: name -> offset of its piece

# Loading by one process is what is meant here, not an accident to be told about.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Piece:
    """What one rank has of a tensor: `tensor` lies at `offset` in the global one, which has `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self):
        ends = [first + n for first, n in zip(self.offset, self.tensor.shape, strict=True)]
        if any(end > n for end, n in zip(ends, self.shape, strict=True)):
            raise ValueError(f"a piece {list(self.tensor.shape)} at {self.offset} leaves its tensor {self.shape}")


Tensors = dict[str, Tensor | Piece]  # a Tensor is whole


def as_piece(part: Tensor | Piece) -> Piece:
    return part if isinstance(part, Piece) else Piece(part, tuple(part.shape), (0,) * part.ndim)


def write_tensors(folder: Path, tensors: Tensors, rank: int = 0) -> Sums:
    """Writes CPU tensors of any shape and dtype as safetensors files into `folder/tensors`, and syncs the files.

    Each rank writes its own files, under names that no other rank uses, several at once. -> their checksums, taken from
    memory on the way to the disk, by their names relative to `folder`. After an error none of this rank's is left: it may
    have been that the disk is full.
    """
    (folder / TENSORS).mkdir(exist_ok=True)
    begin = f"{TENSORS}/shard-{rank + 1:05}-"  # as DCP calls them
    files = _files({name: as_piece(part) for name, part in tensors.items()})

    def write(numbered: tuple[int, dict[str, Piece]]) -> tuple[str, dict]:
        number, pieces = numbered
        name = f"{begin}model-{number:05}-of-{len(files):05}.safetensors"
        offsets = {key: {"saved_offsets": list(piece.offset)} for key, piece in pieces.items()}
        kinds = {key: (tuple(piece.tensor.shape), piece.tensor.dtype) for key, piece in pieces.items()}
        state = new_digest()
        with SafetensorsWriter(folder / name, kinds, {SHARDING: json.dumps(offsets)}, state) as writer:
            for key in writer.names:
                writer.write(key, pieces[key].tensor)
        return name, sums_entry(writer.size, state)

    try:
        return dict(in_threads(write, enumerate(files, start=1), WRITERS))
    except BaseException:
        for path in folder.glob(f"{begin}*"):
            path.unlink(missing_ok=True)
        raise


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
    require_same(path, saved, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in into.items()})
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


def _files(pieces: dict[str, Piece]) -> list[dict[str, Piece]]:
    """In their order, a new file when FILE_BYTES, or each writer's share where that is less, would be exceeded."""
    share = -(-sum(piece.tensor.nbytes for piece in pieces.values()) // WRITERS)
    most = min(FILE_BYTES, max(share, LEAST_FILE_BYTES))
    files, filled = [], 0
    for name, piece in pieces.items():
        if not files or filled and filled + piece.tensor.nbytes > most:
            files.append({})
            filled = 0
        files[-1][name] = piece
        filled += piece.tensor.nbytes
    return files


def require_same(path: Path, saved: dict, wanted: dict) -> None:
    """InputError that names the checkpoint and the first keys unless both are the same name -> (shape, dtype)."""
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
