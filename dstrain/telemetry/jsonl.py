"""Append-only JSON lines that survive a crash and a resume at an earlier step."""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dstrain.config.errors import NO_ROOM


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


class JsonLines:
    """One object a line, on the disk as soon as it is written. Non-finite numbers become null, since JSON has none.

    Where the disk has no room, lines wait in memory, and are written in their order with the first that finds room:
    a full disk ends no run. What waits at the end of the process is lost.
    """

    def __init__(self, path: Path, resume_step: int, warn: Callable[[str], None] = _warn):
        """Continue `path` behind `resume_step`: later lines, which will be made again, and a torn last one go.

        warn: gets a line when lines begin to wait, and when they are written.
        """
        self.path, self.warn = path, warn
        lines = []
        if path.exists():
            # a crash of the machine can leave any bytes in the lines that it tore
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if 0 <= _step(line) <= resume_step]
        part = path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in lines))
        os.replace(part, path)
        self.file = path.open("ab", buffering=0)
        self.waiting = b""  # may begin inside a line

    def write(self, record: dict) -> None:
        late, self.waiting = bool(self.waiting), self.waiting + json.dumps(_finite(record)).encode() + b"\n"
        try:
            while self.waiting:  # a disk that is nearly full takes a part
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                error.filename = str(self.path)  # the system does not say which file
                raise
            if not late:
                self.warn(f"WARNING: {self.path}: {error.strerror.lower()}; its lines wait in memory until there is room")
        else:
            if late:
                self.warn(f"{self.path}: there is room again, and what waited is written")

    def records(self) -> list[dict]:
        """Everything written so far, by earlier starts of the run too."""
        return [json.loads(line) for line in (self.path.read_bytes() + self.waiting).splitlines()]

    def close(self) -> None:
        with suppress(OSError):  # what cannot be written has been a warning or an error of `write` already
            self.file.write(self.waiting)
        self.file.close()


class NoLines:
    """What a rank that does not write the file has in its place."""

    def write(self, record: dict) -> None:
        pass

    def close(self) -> None:
        pass


def _step(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1


def _finite(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
