"""`dstrain prepare`: documents of any source through a tokenizer into Megatron token files, by several processes.

One process reads and cuts shards, workers encode them, and in the end they are joined in the source's order: the result
does not depend on the number of workers, nor on how often the preparation was interrupted.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from dstrain.config.checks import parse_size
from dstrain.config.errors import InputError
from dstrain.config.schema import PrepareConfig
from dstrain.data.documents import Documents, open_documents, row_of
from dstrain.data.indexed import IndexedWriter
from dstrain.data.shards import (
    Counts,
    Cut,
    ShardFolder,
    changed,
    encode_shard,
    file_hash,
    start_worker,
    write_json,
)
from dstrain.data.tokenizer import Tokenizer

FORMAT = 1  # raise it whenever the same source and settings would give other files
CUT = 2  # raise it whenever the same source would be cut into other shards
MOST_ROWS = 1 << 20  # of a shard, however short its documents are
FIRST_BYTES = 1 << 20  # of the first shards; later ones hold GROWTH of what came before them, up to shard_size
GROWTH = 64
REPORT_SECONDS = 10.0


def prepare(config: PrepareConfig) -> int:
    """Write OUT.bin, OUT.idx and OUT.json, or finish an interrupted preparation of the same. -> the exit code."""
    Tokenizer.load(config.tokenizer)  # an unusable one is refused here, not by every worker
    source = open_documents(config)
    job = {
        "format": FORMAT,
        "source": source.identity,
        "tokenizer": file_hash(config.tokenizer),
        **{key: getattr(config, key) for key in ("column", "unit", "limit", "shard_size")},
    }
    summary, report = Path(config.out + ".json"), Console(stderr=True, highlight=False, soft_wrap=True)
    known = _summary(config.out, summary, job)
    if known is None:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        folder = ShardFolder(config.out, {**job, "cut": CUT})
        try:
            known, shards = _encode(config, source, folder, report)
            _join(config.out, folder, shards)
            write_json(summary, {**asdict(known), "job": job})
            shutil.rmtree(folder.path)
        finally:
            folder.close()
    else:
        report.print(f"{config.out} is there already", markup=False)
    print(describe(config.out, known))
    return 0


def describe(out: str, counts: Counts) -> str:
    """The summary in a few lines."""
    lines = [
        f"{out}.bin, {out}.idx",
        f"documents        {counts.documents:,}",
        f"tokens           {counts.tokens:,}",
        f"bytes per token  {counts.bytes / counts.tokens:.3f}",
        f"longest document {counts.longest:,} tokens",
    ]
    if counts.empty:
        lines.append(f"left out         {counts.empty:,} empty documents")
    if counts.not_utf8:
        first = counts.first_not_utf8
        lines.append(f"left out         {counts.not_utf8:,} documents that are not UTF-8, the first: {first}")
    return "\n".join(lines)


def _summary(out: str, path: Path, job: dict) -> Counts | None:
    """The counts of finished files of the same job; None where they have to be written."""
    if path.exists():
        known = json.loads(path.read_text())
        differing = changed(job, known.pop("job"))
        if differing:
            raise InputError(f"out={out}: {path} is of another preparation ({differing}); choose another, or delete it")
        return Counts(**known)
    if Path(out + ".idx").exists() and not Path(out + ".parts").exists():
        raise InputError(f"out={out}: {out}.idx exists and is none of this command's; choose another out")
    return None


def _encode(config: PrepareConfig, source: Documents, folder: ShardFolder, report: Console) -> tuple[Counts, int]:
    """Make every shard that is missing. -> all counts, and the number of shards."""
    meter = Meter(report, config.limit or source.total)
    made: dict[int, Counts] = {}
    first, start = 0, Cut(0, 0, {})
    while (found := folder.finished(first)) is not None:
        made[first], start = found
        meter.earlier(*found)
        first += 1
    if first:
        report.print(f"{first} finished shards found, going on after document {start.rows:,} of the source")
    workers = config.workers or len(os.sched_getaffinity(0))
    running: dict[Future, int] = {}
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (config.tokenizer,)) as pool:
        try:
            for number, (texts, places, cut) in enumerate(_cut(config, source, start), first):
                found = folder.finished(number)
                if found is not None:  # an interrupted start may have left gaps before it
                    made[number] = found[0]
                    meter.earlier(*found)
                    continue
                running[pool.submit(encode_shard, folder.prefix(number), texts, places, cut)] = number
                del texts, places
                while len(running) > 2 * workers:  # each worker has one, and one more to go on with
                    _collect(running, made, meter)
            while running:
                _collect(running, made, meter)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process was ended from outside (out of memory?); the same command goes on, and needs less "
                "memory with fewer workers=…"
            ) from None
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # running shards are finished, and count at the next start
            raise
    total = Counts()
    for number in sorted(made):
        total.add(made[number])
    if not total.documents:
        shutil.rmtree(folder.path)
        first_bad = f", the first: {total.first_not_utf8}" if total.not_utf8 else ""
        raise InputError(
            f"from={config.from_}: no document is left ({total.empty} empty, {total.not_utf8} not UTF-8{first_bad})"
        )
    meter.end()
    return total, len(made)


def _collect(running: dict[Future, int], made: dict[int, Counts], meter: "Meter") -> None:
    """Wait for the next shard, and take what is done."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        counts, cut = future.result()
        made[running.pop(future)] = counts
        meter.now(counts, cut)


def _cut(config: PrepareConfig, source: Documents, start: Cut) -> Iterator[tuple[list[bytes], list[str], Cut]]:
    """Shards from `start` on: texts, their places, and where each shard ends.

    They grow with the source, so that in a small one too there are enough for all workers, and none is long alone.
    """
    if start.state:
        source.rows.load_state_dict(start.state)
    largest, seen, before = parse_size("shard_size", config.shard_size), start.rows, start.bytes
    texts, places, held, size = [], [], 0, 0
    rows = iter(source.rows)
    while config.limit is None or seen < config.limit:
        record = next(rows, None)
        if record is None:
            break
        seen += 1
        text, where, measure = row_of(record, config.column, seen)
        texts.append(text)
        places.append(where)
        held += len(text)
        size += 1 if config.limit else measure
        if held >= min(largest, max(before // GROWTH, FIRST_BYTES)) or len(texts) >= MOST_ROWS:
            before += held
            yield texts, places, Cut(seen, size, source.rows.state_dict(), before)
            texts, places, held, size = [], [], 0, 0
    if texts:
        yield texts, places, Cut(seen, size, source.rows.state_dict(), before + held)


def _join(out: str, folder: ShardFolder, shards: int) -> None:
    with IndexedWriter(out) as writer:
        for number in range(shards):
            writer.append(folder.prefix(number))


class Meter:
    """Lines of progress: share done, speed, time left."""

    def __init__(self, report: Console, total: int | None):
        """total: of the source's own measure; None: unknown, and with it the time left."""
        self.report, self.total = report, total
        self.done = self.done_now = self.documents = self.tokens_now = self.bytes_now = 0
        self.began = self.reported = time.monotonic()

    def earlier(self, counts: Counts, cut: Cut) -> None:
        """Count a shard that was there already."""
        self.done += cut.size
        self.documents += counts.documents

    def now(self, counts: Counts, cut: Cut) -> None:
        """Count a shard that this start has made, and report now and then."""
        self.earlier(counts, cut)
        self.done_now += cut.size
        self.tokens_now += counts.tokens
        self.bytes_now += counts.bytes
        if time.monotonic() - self.reported >= REPORT_SECONDS:
            self.reported = time.monotonic()
            self.report.print(self.line())

    def line(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        parts = [f"{self.documents:,} documents"]
        if self.total:
            parts.insert(0, f"{min(self.done / self.total, 1):4.0%}")
        parts += [f"{self.bytes_now / seconds / 1e6:.1f} MB/s", f"{self.tokens_now / seconds:,.0f} tokens/s"]
        if self.total and self.done_now:
            left = max(self.total - self.done, 0) * seconds / self.done_now
            parts.append(f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left")
        return ", ".join(parts)

    def end(self) -> None:
        if self.tokens_now:
            self.total = None  # done: neither share nor time left
            self.report.print(f"{self.line()}, {time.monotonic() - self.began:.1f} s")
