"""The small disk of tools/storm.py: a tmpfs in mounts of its own, where this process may have that, else a limit."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def in_own_mounts() -> None:
    """Go on in a mount namespace of its own, if this process may have one: what is mounted there ends with it."""
    if os.environ.get("DSTRAIN_STORM_MOUNTS"):
        return
    for private in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        if shutil.which("unshare") and subprocess.run([*private, "true"], capture_output=True).returncode == 0:
            os.environ["DSTRAIN_STORM_MOUNTS"] = "own"
            os.execvp("unshare", [*private, sys.executable, *sys.argv])
    os.environ["DSTRAIN_STORM_MOUNTS"] = "none"


class Disk:
    """Where the runs lie. fill(): nothing more can be written there; free(): as before."""

    def __init__(self, path: Path, mounted: bool):
        self.path, self.mounted = path, mounted
        self.what = "a tmpfs of 64 MiB" if mounted else "a limit of 128 KiB on files (no tmpfs may be mounted)"

    def fill(self, pids: dict[int, int]) -> None:
        if not self.mounted:
            return self._limit(pids, 2**17)  # less than a rank's part of a checkpoint, more than what it says
        with (self.path / "ballast").open("ab", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    def free(self, pids: dict[int, int]) -> None:
        if self.mounted:
            (self.path / "ballast").unlink(missing_ok=True)
        else:
            self._limit(pids, resource.RLIM_INFINITY)

    def _limit(self, pids: dict[int, int], soft: int) -> None:
        for pid in pids.values():
            try:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
            except ProcessLookupError:
                pass


@contextmanager
def make_disk(path: Path) -> Iterator[Disk]:
    """A small file system at `path`, if this process has its own mounts; else a folder."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "storm", str(path)]
    own = os.environ.get("DSTRAIN_STORM_MOUNTS") == "own"
    yield Disk(path, own and subprocess.run(mount, capture_output=True).returncode == 0)
