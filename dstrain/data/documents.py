"""Where `dstrain prepare` takes documents from: plain text, JSONL and Parquet files, and data sets of the Hub.

Every source is a streaming `datasets` data set of rows {text, where, size}: the document's bytes, which nobody has
decoded yet (one broken document must not end a day's work), its place for messages, and its part of the source's size.
The state of such a data set is a small JSON object, so that reading can go on after any row.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dstrain.config.errors import InputError
from dstrain.config.schema import PrepareConfig
from dstrain.data.sources import walk_files

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # any other suffix: text
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
ROWS_AT_ONCE = 1024  # of a Parquet file


@dataclass
class Documents:
    """A source of documents. `total` is the sum of all rows' sizes, None where it is unknown."""

    rows: object  # datasets.IterableDataset
    total: int | None
    identity: list  # what tells this source from another, or from itself after a change: plain values


def open_documents(config: PrepareConfig) -> Documents:
    """The source that `from`, `format` and `pattern` name; InputError where there is none or it lacks the column."""
    path = Path(config.from_).expanduser()
    if config.format == "hub":
        return _hub(config)
    if not path.exists():
        kind = KINDS.get(path.suffix) or KINDS.get(Path(path.stem).suffix)
        if config.format == "auto" and kind is None and path.suffix != ".txt" and HUB_NAME.fullmatch(config.from_):
            return _hub(config)
        raise InputError(f"from={config.from_}: no such file or folder, and no name of a data set on the Hub")
    files = _files(path, config)
    formats = {_kind(file) for file in files} if config.format == "auto" else {config.format}
    if len(formats) > 1:
        raise InputError(
            f"from={config.from_}: files of several formats ({', '.join(sorted(formats))}); choose some with "
            "pattern='*.…' or say format=text|jsonl|parquet"
        )
    kind = formats.pop()
    stats = [file.stat() for file in files]
    identity = [kind, *([str(file), stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats))]
    size, names = sum(stat.st_size for stat in stats), [str(file) for file in files]
    if kind == "parquet":
        groups, rows = _row_groups(names, config.column)
        return Documents(_stream(_parquet, groups, column=config.column), rows, identity)
    if kind == "jsonl":
        return Documents(_stream(_jsonl, names, column=config.column), size, identity)
    return Documents(_stream(_text, names, unit=config.unit), size, identity)


def _files(path: Path, config: PrepareConfig) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():  # a pipe or a device may never end, and an interrupted one cannot be read again
        raise InputError(f"from={config.from_}: neither a file nor a folder; write what comes from there into a file")
    try:
        files = [path / name for name in walk_files(path) if name.match(config.pattern)]
    except ValueError:
        raise InputError(f"pattern={config.pattern!r} names no files; valid: such as '*' or '*.jsonl'") from None
    if not files:
        raise InputError(f"from={config.from_}: no file matches pattern={config.pattern!r} (hidden ones do not count)")
    return files


def _kind(file: Path) -> str:
    plain = Path(file.stem) if file.suffix in COMPRESSED else file
    return KINDS.get(plain.suffix, "text")


def _stream(generator, pieces: list, **settings):
    """A streaming data set of what `generator(pieces, **settings)` yields, whose shards are the pieces."""
    import datasets

    kinds = {"text": "large_binary", "where": "string", "size": "int64"}
    features = datasets.Features({column: datasets.Value(kind) for column, kind in kinds.items()})
    return datasets.IterableDataset.from_generator(
        generator, features=features, gen_kwargs={"pieces": pieces, **settings}
    )


def _lines(name: str) -> Iterator[tuple[bytes, int]]:
    """Lines of a file with their ends, and the bytes on disk that reading each one took."""
    import pyarrow

    raw, codec, before = _open(name), COMPRESSED.get(Path(name).suffix), 0
    try:
        plain = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), codec) if codec else raw
        file = io.BufferedReader(plain, 1 << 20)
        for line in file:
            after = raw.tell()
            yield line, after - before
            before = after
    except OSError as error:
        raise InputError(f"{name}: cannot be read to its end: {' '.join(str(error).split())}") from None
    finally:
        raw.close()


def _open(name: str) -> io.FileIO:
    try:
        return open(name, "rb", buffering=0)
    except OSError as error:
        raise InputError(f"{name}: cannot read this file: {error.strerror}") from None


def _row(text: bytes | None, where: str, size: int) -> dict:
    # A file's name may be no text, and a row's is only shown.
    where = where.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return {"text": text or b"", "where": where, "size": size}


def _text(pieces: list[str], unit: str) -> Iterator[dict]:
    """Documents of plain text: whole files, single lines, or paragraphs (lines between empty ones)."""
    for name in pieces:
        held, size, begin = [], 0, 1
        for number, (line, taken) in enumerate(_lines(name), 1):
            size += taken
            if unit == "line":
                yield _row(line.rstrip(b"\r\n"), f"{name}:{number}", size)
                size = 0
            elif unit == "file" or line.strip():
                held.append(line)
            elif held:
                yield _row(b"".join(held).rstrip(b"\r\n"), f"{name}:{begin}", size)
                held, size, begin = [], 0, number + 1
            else:
                begin = number + 1
        if unit == "file":
            yield _row(b"".join(held), name, size)
        elif held:
            yield _row(b"".join(held).rstrip(b"\r\n"), f"{name}:{begin}", size)


def _jsonl(pieces: list[str], column: str) -> Iterator[dict]:
    for name in pieces:
        for number, (line, size) in enumerate(_lines(name), 1):
            where = f"{name}:{number}"
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield _row(line, where, size)  # left out, and named, where documents are decoded
                continue
            except ValueError as error:
                raise InputError(f"{where}: not a line of JSON ({error})") from None
            if not isinstance(record, dict):
                raise InputError(f"{where}: {type(record).__name__} found, a JSON object {{\"{column}\": …}} is needed")
            yield _row(_encoded(_value(record, column, where), where, column), where, size)


def _value(record: dict, column: str, where: str) -> object:
    if column not in record:
        raise InputError(f"{where}: no column={column}; there are {', '.join(sorted(record)) or 'none'}")
    return record[column]


def _encoded(value: object, where: str, column: str) -> bytes | None:
    """A text's bytes; a lone surrogate, which JSON can spell, becomes bytes that are no UTF-8."""
    if value is None or isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InputError(f"{where}: column={column} holds {type(value).__name__}, text is needed")
    return value.encode("utf-8", "surrogatepass")


def _row_groups(names: list[str], column: str) -> tuple[list[tuple[str, int]], int]:
    """(file, row group) of every row group, and the number of rows; InputError if a file lacks the column of text."""
    import pyarrow
    import pyarrow.parquet

    groups, rows = [], 0
    for name in names:
        try:
            with _open(name) as raw, pyarrow.parquet.ParquetFile(raw) as file:
                schema, metadata = file.schema_arrow, file.metadata
        except pyarrow.ArrowException as error:
            raise InputError(f"{name}: not a Parquet file ({' '.join(str(error).split())})") from None
        if column not in schema.names:
            raise InputError(f"{name}: no column={column}; there are {', '.join(schema.names)}")
        kind = schema.field(column).type
        if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary(), pyarrow.null()):
            raise InputError(f"{name}: column={column} holds {kind}, text is needed")
        groups += [(name, group) for group in range(metadata.num_row_groups)]
        rows += metadata.num_rows
    if not groups:
        raise InputError(f"{names[0]}: no rows")
    return groups, rows


def _parquet(pieces: list[tuple[str, int]], column: str) -> Iterator[dict]:
    import pyarrow
    import pyarrow.parquet

    for name, group in pieces:
        number = 0
        with _open(name) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[column]):
                for value in batch.column(0).cast(pyarrow.large_binary()).to_pylist():  # a cast that decodes nothing
                    number += 1
                    yield _row(value, f"{name}, row {number} of row group {group}", 1)


def _hub(config: PrepareConfig) -> Documents:
    import datasets
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its retries: the line below says what came of them
    name = config.from_
    try:
        found = datasets.load_dataset(name, config.subset, split=config.split, streaming=True)
        columns = found.column_names or list(next(iter(found), {}))
    except ConnectionError as error:
        raise InputError(
            f"from={name}: no such file or folder here, and the Hub cannot be reached ({_first_line(error)}); "
            "valid: a file, a folder, or with a network the name of a data set on the Hub"
        ) from None
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError) as error:
        raise InputError(f"from={name}: not found here nor on the Hub ({_first_line(error)})") from None
    except ValueError as error:  # a subset or split that there is not; the message lists those there are
        raise InputError(f"from={name} subset={config.subset} split={config.split}: {_first_line(error)}") from None
    if config.column not in columns:
        raise InputError(f"from={name}: no column={config.column}; there are {', '.join(columns)}")
    rows = found.select_columns([config.column])
    if found.features is not None:
        kind = found.features[config.column]
        if getattr(kind, "dtype", None) not in ("string", "large_string", "binary", "large_binary"):
            raise InputError(f"from={name}: column={config.column} holds {kind}, text is needed")
        rows = rows.cast_column(config.column, datasets.Value("large_binary"))
    split = (found.info.splits or {}).get(config.split)
    return Documents(rows, split.num_examples if split is not None else None, [name, config.subset, config.split])


def row_of(record: dict, column: str, number: int) -> tuple[bytes, str, int]:
    """Text, place and size of a record that a source's rows gave; `number` counts them from 1."""
    if "where" in record and "size" in record:
        return record["text"], record["where"], record["size"]
    where = f"row {number}"
    return _encoded(record[column], where, column) or b"", where, 1


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
