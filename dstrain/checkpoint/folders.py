"""Names of the folders under a checkpoint root, and how they come and go.

    step-00000100                 a checkpoint, complete if its marker is there
    step-00000100.corrupt         one that failed its checksums, set aside
    .tmp-step-00000100-HOST-PID   being written by that process
    .old-step-00000100-HOST-PID   the former step-00000100, while that process puts a new one in its place
    .trash-step-00000100-HOST-PID being deleted by that process

A folder changes its role by one rename, so no half-written or half-deleted one ever carries a checkpoint's name.
"""

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from dstrain.checkpoint.files import MARKER, sync

_STEP = re.compile(r"step-(\d{8,})")
_WORK = re.compile(r"\.(tmp|old|trash)-(step-\d{8,})-(.+)-(\d+)")
_CORRUPT = ".corrupt"

_ours: set[Path] = set()  # work folders that this process is using now


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def complete(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, newest first."""
    return [(step, path) for step, path in _steps(root) if (path / MARKER).is_file()]


def incomplete(root: Path) -> list[Path]:
    return [path for _, path in _steps(root) if not (path / MARKER).is_file()]


def set_aside(root: Path) -> list[Path]:
    """Checkpoints that were found corrupt, now or earlier."""
    return [path for path in _listed(root) if _CORRUPT in path.name and _STEP.match(path.name)]


def work_folder(kind: str, root: Path, step: int) -> Path:
    """A free name for a folder of this process alone; `release` it when the folder is gone or renamed."""
    path = root.absolute() / f".{kind}-{step_folder(root, step).name}-{socket.gethostname()}-{os.getpid()}"
    if path.exists():  # left by an earlier process with this pid, or by a deletion that failed
        shutil.rmtree(path)
    _ours.add(path)
    return path


def release(path: Path) -> None:
    _ours.discard(path)


def publish(temporary: Path, root: Path, step: int) -> None:
    """Gives a sealed folder its checkpoint name, in place of the one that may have it.

    A kill between the two renames of a replacement leaves the former checkpoint under `.old-`; `clear` brings it back.
    """
    target = step_folder(root, step)
    if not target.exists():
        os.rename(temporary, target)
        sync(root)
        return
    former = work_folder("old", root, step)
    try:
        os.rename(target, former)
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(former, target)
            raise
        sync(root)
        shutil.rmtree(former, ignore_errors=True)  # the new one is durable; `clear` gets what is left
    finally:
        release(former)


def discard(root: Path, step: int) -> None:
    """Deletes a checkpoint."""
    trash = work_folder("trash", root, step)
    try:
        os.rename(step_folder(root, step), trash)
        sync(root)
        shutil.rmtree(trash)
    finally:
        release(trash)


def put_aside(path: Path) -> Path:
    """Renames a corrupt checkpoint so that it is never tried again, and keeps it for whoever looks into it."""
    aside = path.with_name(path.name + _CORRUPT)
    number = 2
    while aside.exists():
        aside = path.with_name(f"{path.name}{_CORRUPT}-{number}")
        number += 1
    os.rename(path, aside)
    sync(path.parent)
    return aside


def clear(root: Path, report: Callable[[str], None]) -> None:
    """Removes what killed processes left under `root`, and undoes a replacement that one of them did not finish.

    A folder of a process that may live is left alone: one of this host that exists, or any of another host.
    """
    for path in _listed(root):
        match = _WORK.fullmatch(path.name)
        if not match:
            continue
        kind, step_name, host, pid = match.groups()
        if host != socket.gethostname():
            report(f"{path}: left by process {pid} on {host}; delete it if no run is writing there")
        elif not _lives(path, int(pid)):
            if kind == "old" and (path / MARKER).is_file() and not (root / step_name).exists():
                os.rename(path, root / step_name)
                sync(root)
            else:
                shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    report(f"{path}: left by a killed process, and could not be deleted")


def _lives(path: Path, pid: int) -> bool:
    if pid == os.getpid():  # ours, or of a former process with our pid (usual in containers)
        return path.absolute() in _ours
    return process_lives(pid)


def process_lives(pid: int) -> bool:
    """Whether this host has a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _steps(root: Path) -> list[tuple[int, Path]]:
    named = ((_STEP.fullmatch(path.name), path) for path in _listed(root))
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _listed(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
