"""Append-only JSON lines that survive a crash and a resume at an earlier step."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path


class JsonLines:
    """One object a line, flushed as written. Non-finite numbers become null, since JSON has none."""

    def __init__(self, path: Path, resume_step: int):
        """Continue `path` behind `resume_step`: later lines, which will be made again, and a torn last one go."""
        self.path = path
        lines = []
        if path.exists():
            # a crash of the machine can leave any bytes in the lines that it tore
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if 0 <= _step(line) <= resume_step]
        part = path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in lines))
        os.replace(part, path)
        self.file = path.open("a")

    def write(self, record: dict) -> None:
        try:
            self.file.write(json.dumps(_finite(record)) + "\n")
            self.file.flush()
        except OSError as error:
            error.filename = str(self.path)  # the system does not say which file
            raise

    def records(self) -> list[dict]:
        """Everything written so far, by earlier starts of the run too."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        with suppress(OSError):  # what cannot be written has been an error of `write` already
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
