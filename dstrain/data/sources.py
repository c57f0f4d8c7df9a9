"""Which texts make a corpus, and which of them are held out.

A source is the Python standard library (on every machine), one text file, or a folder of text files. Files are named
and cut here, and read again when asked, so a large folder does not have to fit into memory.
"""

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from dstrain.config.errors import InputError

HELDOUT_FRACTION = 0.05  # of a user's own text
STDLIB_HELDOUT = (400_000, 500_000)  # bytes: enough to measure on, little enough to evaluate whole
# Files and folders of the standard library that are tables, tests and grammars, or not part of it.
STDLIB_SKIPPED = {
    "__phello__", "__pycache__", "dist-packages", "encodings", "ensurepip", "entities.py", "idlelib", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "stringprep.py", "test", "tests", "turtledemo",
}  # fmt: skip
STDLIB_MACHINE = re.compile(r"_sysconfigdata|config-")  # generated for one machine


@dataclass(frozen=True)
class TextPart:
    """Bytes `start` to `end` of a UTF-8 file: one document. `name` does not depend on where the source lies."""

    name: str
    path: Path
    start: int
    end: int

    def read_bytes(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)

    def read(self) -> str:
        """The text with its line ends as they are."""
        return self.read_bytes().decode("utf-8")


@dataclass
class TextSource:
    """The documents of a corpus. `digest` is a hash of all names, cuts and contents.

    Which side a document is on follows from those."""

    name: str
    train: list[TextPart]
    heldout: list[TextPart]
    digest: str
    skipped: list[str] = field(default_factory=list)  # files left out, with the reason

    def texts(self) -> Iterator[str]:
        """The training texts, one a document."""
        return (part.read() for part in self.train)


def open_source(text: str | None, pattern: str) -> TextSource:
    """The source that `data.text` and `data.pattern` name; InputError if there is no usable text."""
    if text is None:
        return _stdlib()
    path = Path(text).expanduser()
    if not path.exists():
        raise InputError(f"data.text={text}: no such file or folder; a UTF-8 text file or a folder of them is needed")
    if not path.is_dir() and not path.is_file():  # a pipe or a device may never end, and is read more than once
        raise InputError(f"data.text={text}: neither a file nor a folder; write what comes from there into a file")
    return _folder(path, pattern) if path.is_dir() else _file(path)


def stable_hash(name: str) -> int:
    """A 64-bit hash that is the same in every process, on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


class _Reader:
    """Reads every candidate once: finds the unusable ones and hashes the rest."""

    def __init__(self):
        self._digest = hashlib.blake2b(digest_size=16)
        self.skipped: list[str] = []

    def usable(self, name: str, path: Path) -> TextPart | None:
        """The file as one document, or None (and a line in `skipped`) when it is empty or not UTF-8."""
        data = self.read(path)
        problem = text_problem(data)
        if problem:
            self.skipped.append(f"{name}: {problem}")
            return None
        return self.add(name, path, 0, data)

    def read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot read this text: {error.strerror}") from None

    def add(self, name: str, path: Path, start: int, data: bytes) -> TextPart:
        content = hashlib.blake2b(data, digest_size=16).hexdigest()
        self._digest.update(f"{name}\0{start}\0{len(data)}\0{content}\n".encode("utf-8", "surrogateescape"))
        return TextPart(name, path, start, start + len(data))

    def source(self, name: str, train: list[TextPart], heldout: list[TextPart]) -> TextSource:
        return TextSource(name, train, heldout, self._digest.hexdigest(), self.skipped)


def text_problem(data: bytes) -> str | None:
    """Why these bytes are no text to train on: empty (white space only), or not UTF-8 (with the offset)."""
    if not data.strip():
        return "empty"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
    return None


def _stdlib() -> TextSource:
    root = Path(sysconfig.get_path("stdlib"))
    reader = _Reader()
    modules: dict[str, list[TextPart]] = {}
    for relative in walk_files(root):
        if relative.suffix != ".py" or STDLIB_SKIPPED & set(relative.parts) or STDLIB_MACHINE.match(relative.parts[0]):
            continue
        part = reader.usable(relative.as_posix(), root / relative)
        if part is not None:
            modules.setdefault(relative.parts[0].removesuffix(".py"), []).append(part)

    reader.skipped.clear()  # empty __init__.py files: nothing that a user could mend
    # Whole modules are held out, so that no held-out file has its sibling in training. In the order of their hash, each
    # is taken that still fits, until there is enough: the amount is the same for every version of Python.
    least, most = STDLIB_HELDOUT
    held, size = set(), 0
    for module in sorted(modules, key=stable_hash):
        added = sum(part.end - part.start for part in modules[module])
        if size < least and size + added <= most:
            held.add(module)
            size += added
    train = [part for module, parts in modules.items() if module not in held for part in parts]
    heldout = [part for module, parts in modules.items() if module in held for part in parts]
    if not train or not heldout:
        raise InputError(f"{root}: no sources of the Python standard library here; give a text with data.text=PATH")
    return reader.source(f"python{sys.version_info.major}.{sys.version_info.minor}", train, heldout)


def _file(path: Path) -> TextSource:
    reader = _Reader()
    data = reader.read(path)
    problem = text_problem(data)
    if problem:
        raise InputError(f"{path}: {problem}; data.text needs UTF-8 text")
    cut = heldout_cut(data)
    if not data[:cut].strip() or not data[cut:].strip():
        raise InputError(f"{path}: {len(data)} bytes are too little text to train on and keep some for evaluation")
    train = reader.add(path.name, path, 0, data[:cut])
    heldout = reader.add(path.name, path, cut, data[cut:])
    return reader.source(path.stem, [train], [heldout])


def heldout_cut(data: bytes) -> int:
    """Where the held-out end of a file begins: after the line end nearest before the last 5 %, else after the next one.

    A text without line ends is cut at a character.
    """
    body = len(data.rstrip())  # there must be text after the cut
    wanted = min(int(len(data) * (1 - HELDOUT_FRACTION)), body - 1)
    cut = data.rfind(b"\n", 0, wanted) + 1
    after = data.find(b"\n", wanted, body) + 1
    if cut == 0 or (after and after - wanted < wanted - cut):
        cut = after or cut
    if cut == 0:
        cut = wanted
        while data[cut] & 0xC0 == 0x80:  # inside a character
            cut -= 1
    return cut


def _size(part: TextPart) -> int:
    return part.end - part.start


def _folder(root: Path, pattern: str) -> TextSource:
    if not pattern:
        raise InputError("data.pattern is empty; a pattern of file names is needed, such as '*' or '*.txt'")
    try:
        names = [relative for relative in walk_files(root) if relative.match(pattern)]
    except ValueError:
        raise InputError(f"data.pattern={pattern!r} names no files; valid: a pattern such as '*' or '*.txt'") from None
    if not names:
        raise InputError(f"data.text={root}: no file matches data.pattern={pattern!r} (hidden ones do not count)")
    reader = _Reader()
    parts = [part for name in names if (part := reader.usable(name.as_posix(), root / name)) is not None]
    if not parts:
        first = reader.skipped[0]
        raise InputError(f"data.text={root}: none of {len(names)} matching files is UTF-8 text (first: {first})")
    if len(parts) == 1:
        source = _file(parts[0].path)
        source.skipped = reader.skipped
        return source
    # A file's side depends on its own name, so adding files moves no other one.
    order = sorted(parts, key=lambda part: stable_hash(part.name))
    held = [part for part in order if stable_hash(part.name) < HELDOUT_FRACTION * 2**64] or order[:1]
    if 2 * sum(map(_size, held)) > sum(map(_size, parts)):  # a folder of few files: most of the text is for training
        held = [min(parts, key=_size)]
    held = {part.name for part in held}
    train = [part for part in parts if part.name not in held]
    return reader.source(root.resolve().name, train, [part for part in parts if part.name in held])


def walk_files(root: Path) -> list[PurePath]:
    """All files below a folder as paths relative to it, sorted; hidden files and folders are left out."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = [Path(folder) / name for name in files if not name.startswith(".")]
        found += [PurePath(path.relative_to(root)) for path in inside if path.is_file()]
    return sorted(found, key=lambda path: path.parts)
