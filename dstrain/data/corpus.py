"""A corpus: token files for training and evaluation, their tokenizer, and what is known about them.

It is built once from text and found again by a hash of everything that shapes it, or it is a pair of ready token files.
"""

import errno
import hashlib
import json
import lzma
import os
import re
import secrets
import shutil
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dstrain.config.errors import InputError
from dstrain.config.schema import DataConfig
from dstrain.data.indexed import IndexedDataset, IndexedWriter
from dstrain.data.sources import TextPart, TextSource, open_source
from dstrain.data.tokenizer import Tokenizer, check_vocab_size

FORMAT = 1  # raise it whenever the same text and settings would give other files
BATCH_BYTES = 8 << 20  # of text encoded at once
CHECKED_TOKENS = 64_000_000  # token files up to this are checked whole when they are opened
ABANDONED_SECONDS = 24 * 3600  # a build folder older than this belongs to no running build
UNWRITABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST,
}  # fmt: skip


@dataclass
class Corpus:
    """Where a corpus lies and what it holds. Counts of tokens include begin and end marks; bytes are of the texts.

    For ready token files `folder`, bytes and compression are None: nobody knows their text.
    """

    name: str
    fingerprint: str  # changes with anything that changes the tokens
    folder: str | None
    train: str  # prefix of the training token files
    heldout: str | None
    tokenizer: str  # path of a tokenizer.json
    train_documents: int
    train_tokens: int
    train_bytes: int | None = None
    heldout_documents: int = 0
    heldout_tokens: int = 0
    heldout_bytes: int | None = None
    gzip_bits_per_byte: float | None = None  # gzip -9 of the held-out texts, concatenated
    xz_bits_per_byte: float | None = None  # xz -9 of the same
    skipped: list[str] = field(default_factory=list)  # files of the source left out, with the reason
    sources: list[str] = field(default_factory=list)  # of a mixture: prefixes of its token files, in place of `train`


PATHS = {"folder", "train", "heldout", "tokenizer", "sources"}  # not in corpus.json: a corpus may be moved


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus of a data configuration: ready token files, or one built from text under `config.cache` and reused."""
    folder = build_corpus(config)
    return _ready(config) if folder is None else _read(folder)


def build_corpus(config: DataConfig) -> Path | None:
    """What of `open_corpus` is done once for all ranks: the folder of the corpus, built if need be; None for token files."""
    if config.train is not None or config.sources is not None:
        return None
    if config.heldout is not None:
        raise InputError(f"data.heldout={config.heldout} needs data.train: ready token files for training too")
    try:
        return _from_text(config)
    except OSError as error:
        if error.errno in UNWRITABLE:
            reason = error.strerror.lower()
            raise InputError(f"data.cache={config.cache}: the corpus cannot be written there: {reason}") from None
        raise


def cached_corpus(config: DataConfig, fingerprint: str) -> Corpus | None:
    """The corpus of that fingerprint, if it was built from text and is still in the cache; the text may be gone."""
    folder = next(Path(config.cache).glob(f"*-{fingerprint}"), None)
    return None if folder is None else _read(folder)


def check_vocabulary(dataset: IndexedDataset, vocab_size: int, where: str) -> None:
    """InputError naming the first id outside 0 … vocab_size - 1; of very large files only the beginning is read."""
    chunk, end = 1 << 20, min(dataset.num_tokens, dataset.size, CHECKED_TOKENS)
    for start in range(0, end, chunk):
        ids = dataset.ids(start, min(chunk, end - start))
        if ids.min() < 0 or ids.max() >= vocab_size:
            place = int(np.argmax((ids < 0) | (ids >= vocab_size)))
            raise InputError(
                f"{dataset.bin_path}: token id {int(ids[place])} at token {start + place}, "
                f"{where} has the ids 0 … {vocab_size - 1}"
            )


def _ready(config: DataConfig) -> Corpus:
    if config.text is not None:
        raise InputError(f"data.text={config.text} and ready token files exclude each other: set one of them")
    key = f"data.train={config.train}" if config.sources is None else "data.sources"
    if config.tokenizer is None:
        raise InputError(f"{key} needs data.tokenizer, the tokenizer.json that the ids belong to")
    if config.sources is None:
        prefixes = [config.train]
    else:
        prefixes = [os.path.expanduser(source.train) for source in config.sources]
    train = [IndexedDataset(prefix) for prefix in prefixes]
    heldout = IndexedDataset(config.heldout) if config.heldout is not None else None
    tokenizer = Tokenizer.load(config.tokenizer)
    seen = hashlib.blake2b(Path(config.tokenizer).read_bytes(), digest_size=16)
    for dataset in filter(None, (*train, heldout)):
        check_vocabulary(dataset, tokenizer.vocab_size, config.tokenizer)
        # The lengths of all documents and the beginning: cheap however large the files are, and it tells them apart.
        with open(dataset.idx_path, "rb") as file:
            while part := file.read(1 << 20):
                seen.update(part)
        seen.update(dataset.ids(0, min(1 << 20, dataset.size)).tobytes())
    return Corpus(
        name=Path(config.train).name if config.sources is None else " + ".join(s.label for s in config.sources),
        fingerprint=seen.hexdigest(),
        folder=None,
        train=config.train if config.sources is None else key,
        heldout=config.heldout,
        tokenizer=config.tokenizer,
        train_documents=sum(dataset.num_documents for dataset in train),
        train_tokens=sum(dataset.num_tokens for dataset in train),
        heldout_documents=heldout.num_documents if heldout else 0,
        heldout_tokens=heldout.num_tokens if heldout else 0,
        sources=[] if config.sources is None else prefixes,
    )


def _from_text(config: DataConfig) -> Path:
    if config.tokenizer is None:
        check_vocab_size(config.vocab_size)
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer is not None else None
    source = open_source(config.text, config.pattern)
    about = {
        "format": FORMAT,
        "texts": source.digest,
        "tokenizer": hashlib.sha256(Path(config.tokenizer).read_bytes()).hexdigest() if tokenizer else None,
        "vocab_size": None if tokenizer else config.vocab_size,
    }
    fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.")[:40] or "text"
    vocabulary = "own-tokenizer" if tokenizer else f"v{config.vocab_size}"
    folder = Path(config.cache) / f"{name}-{vocabulary}-{fingerprint}"
    if not folder.exists():
        _build_in_place(folder, name, fingerprint, source, tokenizer, config.vocab_size)
    return folder


def _read(folder: Path) -> Corpus:
    about = folder / "corpus.json"
    try:
        known = json.loads(about.read_text())
        corpus = Corpus(
            folder=str(folder),
            train=str(folder / "train"),
            heldout=str(folder / "heldout"),
            tokenizer=str(folder / "tokenizer.json"),
            **known,
        )
    except (OSError, ValueError, TypeError):
        raise InputError(f"{about}: missing or damaged; delete the folder and it will be built again") from None
    vocab_size = Tokenizer.load(corpus.tokenizer).vocab_size
    for prefix, tokens in ((corpus.train, corpus.train_tokens), (corpus.heldout, corpus.heldout_tokens)):
        dataset = IndexedDataset(prefix)
        if dataset.num_tokens != tokens:
            raise InputError(f"{dataset.bin_path}: {dataset.num_tokens} tokens found, expected {tokens} from {about}")
        check_vocabulary(dataset, vocab_size, corpus.tokenizer)
    return corpus


def _build_in_place(
    folder: Path, name: str, fingerprint: str, source: TextSource, tokenizer: Tokenizer | None, vocab_size: int
) -> None:
    """Build in a folder of our own and give it its name when complete. Of two builders the first to finish wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(".building-*"):
        if time.time() - old.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    building = folder.parent / f".building-{os.getpid()}-{secrets.token_hex(4)}"
    building.mkdir()
    try:
        _build(building, folder, name, fingerprint, source, tokenizer, vocab_size)
        try:
            os.rename(building, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _build(
    building: Path,
    folder: Path,
    name: str,
    fingerprint: str,
    source: TextSource,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"building the corpus {folder}")
    if source.skipped:
        console.print(f"left out {len(source.skipped)} file(s), the first: {source.skipped[0]}", markup=False)
    corpus = Corpus(
        name=name,
        fingerprint=fingerprint,
        folder=str(folder),
        train="",
        heldout="",
        tokenizer="",
        train_documents=len(source.train),
        train_tokens=0,
        train_bytes=_size(source.train),
        heldout_documents=len(source.heldout),
        heldout_bytes=_size(source.heldout),
        skipped=source.skipped,
    )
    share = TextColumn("{task.percentage:>3.0f}%")
    columns = TextColumn("{task.description:<20}"), BarColumn(), share, TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        if tokenizer is None:
            task = progress.add_task("train the tokenizer", total=None)
            tokenizer = Tokenizer.train(source.texts(), vocab_size)
            progress.update(task, total=1, completed=1)
        tokenizer.save(building / "tokenizer.json")
        corpus.train_tokens = _write_tokens(building / "train", source.train, tokenizer, progress)
        corpus.heldout_tokens = _write_tokens(building / "heldout", source.heldout, tokenizer, progress)
        zipped, xzed = _compressed_sizes(source.heldout, progress)
    corpus.gzip_bits_per_byte = 8 * zipped / corpus.heldout_bytes
    corpus.xz_bits_per_byte = 8 * xzed / corpus.heldout_bytes
    known = {key: value for key, value in asdict(corpus).items() if key not in PATHS}
    with open(building / "corpus.json", "w") as file:
        json.dump(known, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _size(parts: list[TextPart]) -> int:
    return sum(part.end - part.start for part in parts)


def _write_tokens(prefix: Path, parts: list[TextPart], tokenizer: Tokenizer, progress: Progress) -> int:
    """Encode the parts, one document each, in batches; returns the number of tokens."""
    task = progress.add_task(f"encode {prefix.name}", total=_size(parts))
    tokens, batch, size = 0, [], 0
    with IndexedWriter(prefix) as writer:
        for i, part in enumerate(parts):
            batch.append(part.read())
            size += part.end - part.start
            if size >= BATCH_BYTES or i == len(parts) - 1:
                for ids in tokenizer.encode_documents(batch):
                    writer.add_document(np.array(ids, np.int64))
                    tokens += len(ids)
                progress.advance(task, size)
                batch, size = [], 0
    return tokens


def _compressed_sizes(parts: list[TextPart], progress: Progress) -> tuple[int, int]:
    """Bytes that `gzip -9` and `xz -9` make of the concatenated texts, by zlib and liblzma."""
    task = progress.add_task("gzip and xz", total=_size(parts))
    deflate = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # a gzip stream
    xz = lzma.LZMACompressor(lzma.FORMAT_XZ, preset=9)
    zipped = xzed = 0
    for part in parts:
        data = part.read_bytes()
        for start in range(0, len(data), BATCH_BYTES):
            piece = data[start : start + BATCH_BYTES]
            zipped += len(deflate.compress(piece))
            xzed += len(xz.compress(piece))
            progress.advance(task, len(piece))
    return zipped + len(deflate.flush()), xzed + len(xz.flush())
