"""`dstrain report`, and the report at the end of each run: what a run did, as one HTML file that needs no network."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dstrain.config.errors import InputError
from dstrain.config.schema import ReportConfig
from dstrain.telemetry.console import RunConsole
from dstrain.telemetry.report_page import page
from dstrain.telemetry.report_read import Run, read_run

MOST_RUNS = 10  # that colours tell apart
REPORT_SECONDS = 10.0  # between lines about the reading, where no bar is shown


def report(config: ReportConfig) -> int:
    """Write the page of the runs that `config` names, and say where. -> the exit code."""
    paths = run_paths(config.run)
    out = Path(config.out or (paths[0] / "report.html" if len(paths) == 1 else "report.html"))
    console = RunConsole(1, to_stderr=True)
    runs = [_read(path, console) for path in paths]
    counts = Counter(run.name for run in runs)
    for run in runs:
        if counts[run.name] > 1:
            run.name = str(run.path)
    try:
        write(runs, out)
    except OSError as error:
        raise InputError(f"out={out}: the report cannot be written: {error.strerror}") from None
    print(out)
    return 0


def report_of_run(folder: Path, console: RunConsole) -> None:
    """`report.html` in a run's own folder. Where that fails there is a warning, and nothing else changes."""
    try:
        write([_read(folder, console)], folder / "report.html")
    except Exception as error:
        console.say(f"WARNING: report.html was not written: {type(error).__name__}: {error}")


def run_paths(text: str) -> list[Path]:
    """The folders that `run=` names: one, or several between commas, in brackets or not. Raises InputError."""
    whole = Path(text).expanduser()
    if whole.is_dir():  # a comma may be part of its name
        return [whole]
    inner = text.strip().removeprefix("[").removesuffix("]")
    names = [name for part in inner.split(",") if (name := part.strip().strip("'\""))]
    paths = [Path(name).expanduser() for name in names]
    if not paths:
        raise InputError(f"run={text}: must name a run folder, or several as in run=runs/a,runs/b")
    if len(paths) > MOST_RUNS:
        raise InputError(f"run=…: {len(paths)} runs; at most {MOST_RUNS} can be told apart in one report")
    twice = [path for path, count in Counter(map(Path.resolve, paths)).items() if count > 1]
    if twice:
        raise InputError(f"run={text}: {twice[0]} is named twice")
    return paths


def write(runs: list[Run], out: Path) -> None:
    """Whole or not at all: a page that is there stays until the new one is complete. Raises OSError."""
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_text(page(runs), encoding="utf-8")
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path, console: RunConsole) -> Run:
    """A run's files, with a bar on a terminal and a line now and then elsewhere."""
    what = f"reading {path / 'metrics.jsonl'}"
    with console.task(what) as bar:
        return read_run(path, _said(console, what, bar))


def _said(console: RunConsole, what: str, bar: Callable[[int, int], None]) -> Callable[[int, int], None]:
    last, moved = time.monotonic(), 0.0

    def show(done: int, total: int) -> None:
        nonlocal last, moved
        now = time.monotonic()
        if now - moved > 0.1:
            bar(done, total)
            moved = now
        if now - last > REPORT_SECONDS and not console.shows_bar:
            console.say(f"{what}: {done / total:.0%}")
            last = now

    return show
