"""Durable files and their checksums.

`checksums.json` lists every file of a checkpoint with its size in bytes and its BLAKE2b-256; the marker file `COMPLETE`
holds the digest of that list. The marker is written last, so a folder with a marker was once whole, and a folder whose
digests agree still is.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from dstrain.checkpoint.in_threads import in_threads
from dstrain.checkpoint.progress import byte_progress
from dstrain.config.errors import InputError

MARKER = "COMPLETE"
CHECKSUMS = "checksums.json"
TENSORS = "tensors"  # folder of the tensor files
READERS = 8  # files that are verified at once, with as many processors
_CHUNK = 2**22


class CorruptCheckpoint(InputError):
    """A complete checkpoint whose bytes are not those that were written; the line names the file and what is wrong."""


def write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Forces a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Sums = dict[str, dict]  # relative name -> its size and digest


def checksums(folder: Path, names: Iterable[str], advance: Callable[[int], None] = lambda nbytes: None) -> Sums:
    """Of files of `folder`, by their names relative to it. advance: called with the number of bytes read."""
    return {
        name: {"size": (folder / name).stat().st_size, "blake2b": _digest(folder / name, advance)} for name in names
    }


def new_digest():
    """A state of hashlib that takes a file's bytes."""
    return _blake2b()


def sums_entry(size: int, state) -> dict:
    """What `Sums` holds of a file of `size` bytes that went through `state`."""
    return {"size": size, "blake2b": state.hexdigest()}


def seal(folder: Path, advance: Callable[[int], None] = lambda nbytes: None, known: Sums | None = None) -> None:
    """Makes `folder` complete: checksums of all its files, everything on the disk, then the marker.

    advance: called with the number of bytes read for checksums. known: checksums of files that whoever wrote them has
    forced to the disk.
    """
    known = known or {}
    new = [name for name in _file_names(folder) if name not in known]
    for name in new:
        sync(folder / name)
    sums = dict(sorted({**known, **checksums(folder, new, advance)}.items()))
    listing = json.dumps({"files": sums}, indent=1).encode()
    write_file(folder / CHECKSUMS, listing)
    for inner in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync(inner)
    sync(folder)
    write_file(folder / MARKER, _blake2b(listing).hexdigest().encode() + b"\n")
    sync(folder)


def verify(folder: Path) -> None:
    """Recomputes every checksum of a complete checkpoint.

    Raises CorruptCheckpoint that names the file and whether it is missing, foreign, of another size or of other
    content; InputError where there is no complete checkpoint, or no permission to read it.
    """
    require_complete(folder)
    try:
        _verify(folder)
    except PermissionError as error:
        raise InputError(f"checkpoint {folder}: no permission to read {error.filename}") from error
    except OSError as error:
        raise CorruptCheckpoint(f"checkpoint {folder}: {error.filename or 'a file'}: {error.strerror}") from error
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CorruptCheckpoint(f"checkpoint {folder}: {CHECKSUMS}: not a list of checksums ({error!r})") from error


def require_complete(folder: Path) -> None:
    if not (folder / MARKER).is_file():
        raise InputError(f"no complete checkpoint at {folder}: its marker file {MARKER} is not there")


def _verify(folder: Path) -> None:
    def corrupt(name: str, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"checkpoint {folder}: {name}: {what}")

    try:
        listing = (folder / CHECKSUMS).read_bytes()
    except FileNotFoundError:
        raise corrupt(CHECKSUMS, "the file is missing") from None
    if (folder / MARKER).read_bytes().strip() != _blake2b(listing).hexdigest().encode():
        raise corrupt(CHECKSUMS, f"its checksum is not the one in {MARKER}")
    expected = json.loads(listing)["files"]

    present = set(_file_names(folder))
    for name in sorted(expected.keys() - present):
        raise corrupt(name, "the file is missing")
    # Whatever lies in the tensor folder would be read as tensors; a stray file elsewhere does no harm.
    for name in sorted(name for name in present - expected.keys() if name.startswith(f"{TENSORS}/")):
        raise corrupt(name, "the file does not belong to this checkpoint")
    # Sizes first: they are free, and the usual damage is a truncated file.
    for name, entry in expected.items():
        size = (folder / name).stat().st_size
        if size != entry["size"]:
            raise corrupt(name, f"size is {size} bytes, not {entry['size']}")
    total = sum(entry["size"] for entry in expected.values())
    with byte_progress(f"verifying {folder.name}", total) as advance:
        def check(name: str) -> None:
            if _digest(folder / name, advance) != expected[name]["blake2b"]:
                raise corrupt(name, "its checksum differs, the content was changed")

        in_threads(check, expected, min(READERS, len(os.sched_getaffinity(0))))


def _file_names(folder: Path) -> list[str]:
    """Relative names, with '/', of all regular files below `folder` but the two that describe the others."""
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [name for name in names if name not in (MARKER, CHECKSUMS)]


def _blake2b(data: bytes = b""):
    return hashlib.blake2b(data, digest_size=32)


def _digest(path: Path, advance: Callable[[int], None] = lambda nbytes: None) -> str:
    state = _blake2b()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
            advance(len(chunk))
    return state.hexdigest()
