"""How the ranks of a save tell each other that their parts are written: small files beside the tensors.

    TEMPORARY/parts/3.json    of rank 3: the checksums of its files, or why it failed

They are gone from a complete checkpoint. The writing threads use these and no collectives: training needs those.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from dstrain.checkpoint.files import TENSORS, Sums, write_file

PARTS = "parts"
POLL = 0.02, 1.0  # seconds between two looks: the first, and the longest


def make(folder: Path, ranks: int) -> None:
    """A temporary folder that is ready for the files of so many ranks."""
    folder.mkdir()
    (folder / TENSORS).mkdir()
    if ranks > 1:
        (folder / PARTS).mkdir()


def report(folder: Path, rank: int, sums: Sums) -> None:
    """This rank's files are on the disk."""
    _write(folder, rank, {"files": sums})


def report_failure(folder: Path, rank: int, why: str) -> None:
    """This rank's files will not come. On a broken disk this may fail too; then the first rank's wait ends."""
    try:
        _write(folder, rank, {"error": why})
    except OSError:
        pass


def collect(folder: Path, ranks: Iterable[int], timeout: float) -> Sums:
    """Waits for these ranks. -> the checksums of all their files; the ranks' files about it are deleted.

    Raises RuntimeError with the reason of a rank that failed, TimeoutError with the ranks that were not heard of.
    """
    missing, sums = set(ranks), {}
    if not missing:
        return sums
    for _ in _looks(timeout):
        present = set(os.listdir(folder / PARTS))  # of a listing other machines' new files are seen soonest
        for rank in sorted(rank for rank in missing if f"{rank}.json" in present):
            part = json.loads((folder / PARTS / f"{rank}.json").read_bytes())
            if "error" in part:
                raise RuntimeError(f"rank {rank}: {part['error']}")
            sums |= part["files"]
            missing.discard(rank)
        if not missing:
            shutil.rmtree(folder / PARTS)
            return sums
    names = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(map(str, sorted(missing)[:8]))
    raise TimeoutError(f"after {timeout:g} s no part has come from {names}{', …' if len(missing) > 8 else ''}")


def wait_for_first(folder: Path, timeout: float) -> None:
    """Returns when the first rank is done with the temporary folder, whatever came of it; else raises TimeoutError."""
    for _ in _looks(timeout):
        if not folder.exists():
            return
    raise TimeoutError(f"rank 0 has not completed the checkpoint after {timeout:g} s")


def _looks(timeout: float):
    """Yields now and again until `timeout` seconds are over."""
    end, pause = time.monotonic() + timeout, POLL[0]
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(min(pause, max(end - time.monotonic(), 0.0)))
        pause = min(2 * pause, POLL[1])


def _write(folder: Path, rank: int, content: dict) -> None:
    """Whole or not at all: by a rename. Nothing may follow it: the first rank may delete the folder at once.

    So the folder is not synced: a message is for processes that live, a crash ends the whole save.
    """
    new = folder / PARTS / f".{rank}"
    write_file(new, json.dumps(content).encode())
    os.rename(new, folder / PARTS / f"{rank}.json")
