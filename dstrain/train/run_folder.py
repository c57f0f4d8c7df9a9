"""The run folder: one process at a time, and `status.json`, which launchers read."""

import fcntl
import json
import os
import time
from pathlib import Path

from dstrain.config.errors import InputError


class RunFolder:
    """`<run.dir>/<run.name>/`, held by one process: a second one is refused instead of mixing two runs."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise InputError(f"run folder {path} cannot be made: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"run folder {path} is in use by another process; wait for it or choose another run.name") from None

    def release(self) -> None:
        """Another process, or another run of this one, may hold the folder now."""
        self._lock.close()

    def clear_status(self) -> None:
        """Called once the run really starts: a refused start has done nothing to it, a killed one leaves no status."""
        (self.path / "status.json").unlink(missing_ok=True)

    def write_status(self, status: str, **details) -> None:
        """status: finished | interrupted | failed. Written whole or not at all, before the process exits."""
        part = self.path / "status.json.part"
        with part.open("w") as file:
            json.dump({"status": status, **details, "time": time.time()}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path / "status.json")


class FollowedFolder:
    """The run folder as the ranks other than the first see it: they know where it is, and leave it alone."""

    def __init__(self, path: Path):
        self.path = path

    def release(self) -> None:
        pass

    def clear_status(self) -> None:
        pass

    def write_status(self, status: str, **details) -> None:
        pass
