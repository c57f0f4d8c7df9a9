"""What a person watches: a live progress bar on a terminal, a line every few steps elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column


class LastingOutput:
    """Standard output for as long as it works: a reader that leaves (| head) or a full disk must not end a run."""

    def __init__(self, file: TextIO):
        self.file = file

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def write(self, text: str) -> int:
        with self._lasting():
            self.file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self.file.flush()

    @contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # what is buffered goes nowhere too, else Python complains at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            with suppress(OSError):
                print(f"dstrain: standard output is gone ({error.strerror}); going on without it", file=sys.stderr)


class RunConsole:
    def __init__(self, log_every: int, quiet: bool = False, to_stderr: bool = False):
        """quiet: say nothing, for ranks other than the first. to_stderr: standard output is for something else."""
        stream = sys.stderr if to_stderr else sys.stdout
        file = LastingOutput(stream) if stream is not None else None  # None: closed by whoever started us
        self.console = Console(file=file, highlight=False, soft_wrap=True, quiet=quiet)
        self.log_every = log_every
        self.live = None
        self.log: Callable[[str], None] = lambda text: None  # gets what is said, also where nobody hears it

    @property
    def shows_bar(self) -> bool:
        return self.console.is_terminal and not self.console.quiet

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)
        self.log(text)

    def begin(self, done: float, total: float) -> None:
        """done, total: progress of the run in its own unit (steps or tokens)."""
        self.first, self.begun = done, time.monotonic()
        if self.shows_bar:
            self.live = _progress(self.console)
            self.bar = self.live.add_task("", total=total, completed=done)
            self.live.start()

    def step(self, metrics: dict, done: float, total: float) -> None:
        if self.live is not None:
            self.live.update(self.bar, completed=done, description=_line(metrics))
        if metrics["skipped"]:
            spike = f"loss {metrics['loss_main']:.4f} is a spike"
            why = spike if metrics.get("spike") else "non-finite loss or gradient"
            self.say(f"step {metrics['step']}: {why}, skipped; weights stand still")
        elif metrics["step"] % self.log_every == 0 or done >= total:
            left = (time.monotonic() - self.begun) * (total - done) / max(done - self.first, 1e-9)
            self.say(_line(metrics) + ("" if self.live else f"  left {_clock(left)}"))

    @contextmanager
    def task(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Something that may take long beside the steps: a bar on a terminal. Gives a function of (done, total)."""
        progress = self.live
        if self.shows_bar and progress is None:
            progress = _progress(self.console)
            progress.start()
        task = None if progress is None else progress.add_task(what, total=None)
        try:
            yield lambda done, total: progress.update(task, completed=done, total=total) if progress else None
        finally:
            if progress is not None:
                progress.remove_task(task)
                if progress is not self.live:
                    progress.stop()

    def end(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def _progress(console: Console) -> Progress:
    """Bar and time left come first and whole: on a narrow terminal only the text behind them is cut."""
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    return Progress(BarColumn(bar_width=20), TimeRemainingColumn(), text, console=console, expand=True)


def _line(m: dict) -> str:
    mtp = "".join(f" {loss:.3f}" for loss in m["loss_mtp"])
    return (
        f"step {m['step']}  loss {m['loss_main']:.4f}" + (f"  mtp{mtp}" if mtp else "") + f"  lr {m['lr']:.2e}"
        f"  grad {m['grad_norm']:.2f}  {m['tokens_per_second']:,.0f} tok/s  mfu {m['mfu']:.0%}"
        f"  maxvio {m['moe_max_violation']:.2f}"
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
