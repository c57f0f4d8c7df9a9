"""`logs/rank-N.log` of a run folder: what a rank says, its warnings, and its stacks when the run fails.

The first rank speaks on the console and writes its log beside it. The others have the log for their standard output
and error, so that warnings of libraries and fatal errors of native code are in it too, and the console stays readable.
"""

import faulthandler
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


class RankLog:
    """The log of one rank, opened for appending. `close` gives standard output and error back."""

    def __init__(self, folder: Path, rank: int, redirect: bool):
        """redirect: standard output and error go into the log. Raises OSError where it cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.log"
        self.file = self.path.open("a", buffering=1)
        self.saved: dict[int, int] = {}
        if redirect:
            _flush()
            for number in (1, 2):
                with suppress(OSError):  # closed by whoever started us
                    self.saved[number] = os.dup(number)
                    os.dup2(self.file.fileno(), number)

    def say(self, text: str) -> None:
        """A line with the time. A full disk loses it and nothing else."""
        with suppress(OSError, ValueError):
            for line in text.splitlines():
                self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")

    def stacks(self) -> None:
        """Where every thread of this process is."""
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(self.file, all_threads=True)

    def on_console(self, line: str) -> None:
        """A line on the process's own standard error, which may be the log by now."""
        with suppress(OSError):
            os.write(self.saved.get(2, 2), f"{line}\n".encode())

    def close(self) -> None:
        _flush()
        for number, saved in self.saved.items():
            os.dup2(saved, number)
            os.close(saved)
        self.saved = {}
        with suppress(OSError):
            self.file.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
