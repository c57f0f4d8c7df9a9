"""Shards of a preparation: what a worker process makes of some documents, and the folder in which shards wait.

A shard is a pair of token files and a `.json` that is written last, so a shard with a `.json` is complete. Shards are
cut by the source's order alone: a later start, with any number of workers, cuts the same ones.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass
from multiprocessing import connection, parent_process
from pathlib import Path

from dstrain.config.errors import InputError
from dstrain.data.indexed import IndexedWriter
from dstrain.data.sources import text_problem
from dstrain.data.tokenizer import Tokenizer

BATCH_BYTES = 4 << 20  # of text encoded at once


@dataclass
class Counts:
    """What became of documents. Tokens include begin and end marks; bytes are of UTF-8 text."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    longest: int = 0  # tokens of the longest document
    empty: int = 0  # left out: nothing but white space
    not_utf8: int = 0  # left out
    first_not_utf8: str | None = None  # where, and what is wrong there

    def add(self, other: "Counts") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.longest = max(self.longest, other.longest)
        self.empty += other.empty
        self.not_utf8 += other.not_utf8
        self.first_not_utf8 = self.first_not_utf8 or other.first_not_utf8


@dataclass
class Cut:
    """Where a shard ends in its source."""

    rows: int  # of the source, up to here
    size: int  # of the shard alone, as the source measures itself
    state: dict  # of the source's rows, from which reading goes on
    bytes: int = 0  # of the source's texts, up to here


class ShardFolder:
    """`OUT.parts`: finished shards, and the job that they belong to. One process at a time uses it."""

    def __init__(self, out: str, job: dict):
        """Create or reopen; InputError where it holds shards of another job or is in use."""
        self.path = Path(out + ".parts")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / "lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"out={out}: another process is preparing it now") from None
        about = self.path / "job.json"
        if self._has_shards():
            differing = changed(job, json.loads(about.read_text()))
            if differing:
                raise InputError(
                    f"{self.path} holds the shards of an interrupted preparation with another {differing}; delete the "
                    "folder or choose another out"
                )
        else:
            write_json(about, job)

    def _has_shards(self) -> bool:
        return next(self.path.glob("shard-*.json"), None) is not None

    def prefix(self, number: int) -> Path:
        return self.path / f"shard-{number:06}"

    def finished(self, number: int) -> tuple[Counts, Cut] | None:
        """What is known about shard `number`; None if it is not there."""
        try:
            known = json.loads((self.path / f"shard-{number:06}.json").read_text())
        except FileNotFoundError:
            return None
        return Counts(**known["counts"]), Cut(**known["cut"])

    def close(self) -> None:
        """Let others in; a folder without finished shards is removed, there is nothing in it to go on with."""
        if self.path.exists() and not self._has_shards():
            shutil.rmtree(self.path)
        self._lock.close()


def changed(job: dict, other: dict) -> str:
    """The names of what differs between two jobs, "" where they are the same."""
    return ", ".join(key for key in {**job, **other} if job.get(key) != other.get(key))


def write_json(path: Path, content: dict) -> None:
    """Write a file durably and at once."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


_tokenizer: Tokenizer | None = None  # of a worker process


def start_worker(tokenizer: str) -> None:
    """Make this process a worker: one thread, its tokenizer loaded, and it ends when its parent does."""
    import signal

    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops, and lets running shards be finished
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    _tokenizer = Tokenizer.load(tokenizer)


def encode_shard(prefix: Path, texts: list[bytes], places: list[str], cut: Cut) -> tuple[Counts, Cut]:
    """Write the documents of one shard; `places` name them in messages."""
    counts = Counts()
    with IndexedWriter(prefix) as writer:
        batch, size = [], 0
        for number, (text, where) in enumerate(zip(texts, places), 1):
            problem = text_problem(text)
            if problem == "empty":
                counts.empty += 1
            elif problem:
                counts.not_utf8 += 1
                counts.first_not_utf8 = counts.first_not_utf8 or f"{where}: {problem}"
            else:
                batch.append(text.decode("utf-8"))
                size += len(text)
            if batch and (size >= BATCH_BYTES or number == len(texts)):
                for ids in _tokenizer.encode_documents(batch):
                    writer.add_document(ids)
                    counts.add(Counts(documents=1, tokens=len(ids), longest=len(ids)))
                counts.bytes += size
                batch, size = [], 0
    write_json(prefix.with_name(prefix.name + ".json"), {"counts": asdict(counts), "cut": asdict(cut)})
    return counts, cut


def file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
