"""How the ranks of a save tell each other that their parts are written: small files beside the tensors.

    TEMPORARY/parts/3.json          of rank 3: the checksums of its files
    TEMPORARY/parts/3.failed WHY    an empty file: they will not come. On a full disk there is no room for more

They are gone from a complete checkpoint. The writing threads use these and no collectives: training needs those.
"""

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from dstrain.checkpoint.files import TENSORS, Sums, write_file

PARTS = "parts"
FAILED = "failed "
LONGEST = 200  # bytes of a reason, as it stands in a file's name
POLL = 0.02, 1.0  # seconds between two looks: the first, and the longest


def make(folder: Path, ranks: int) -> None:
    """A temporary folder that is ready for the files of so many ranks."""
    folder.mkdir()
    (folder / TENSORS).mkdir()
    if ranks > 1:
        (folder / PARTS).mkdir()


def report(folder: Path, rank: int, sums: Sums) -> None:
    """This rank's files are on the disk.

    Whole or not at all: by a rename. Nothing may follow it: the first rank may delete the folder at once. So the folder is
    not synced: a message is for processes that live, a crash ends the whole save.
    """
    new = folder / PARTS / f".{rank}"
    write_file(new, json.dumps(sums).encode())
    os.rename(new, folder / PARTS / f"{rank}.json")


def report_failure(folder: Path, rank: int, why: str, timeout: float) -> None:
    """This rank's files will not come. Tried until it is said, the first rank is done, or `timeout` seconds are over."""
    while len(reason := quote(why, safe=" ")) > LONGEST:
        why = why[:-1]
    for _ in _looks(timeout):
        try:
            (folder / PARTS / f"{rank}.{FAILED}{reason}").touch()
            return
        except OSError:
            if not folder.exists():
                return


def collect(folder: Path, ranks: Iterable[int], timeout: float) -> Sums:
    """Waits for these ranks. -> the checksums of all their files; the ranks' files about it are deleted.

    Raises RuntimeError with the reason of a rank that failed, TimeoutError with the ranks that were not heard of.
    """
    missing, sums = set(ranks), {}
    if not missing:
        return sums
    for _ in _looks(timeout):
        for name in sorted(os.listdir(folder / PARTS)):  # of a listing other machines' new files are seen soonest
            rank, _, what = name.partition(".")
            if what.startswith(FAILED):
                raise RuntimeError(f"rank {rank}: {unquote(what.removeprefix(FAILED))}")
            if what == "json" and int(rank) in missing:
                sums |= json.loads((folder / PARTS / name).read_bytes())
                missing.discard(int(rank))
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
