"""A progress bar over bytes, on stderr, for reads that take more than a moment."""

from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

SLOW_BYTES = 2**29  # below this a disk needs less than about two seconds


@contextmanager
def byte_progress(what: str, total: int):
    """Yields `advance(nbytes)`; draws `what` and a bar only where `total` bytes are enough to take a while."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=total < SLOW_BYTES) as bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
