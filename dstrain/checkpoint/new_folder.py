"""A folder that appears under its name complete or not at all."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dstrain.checkpoint.files import sync
from dstrain.checkpoint.folders import process_lives
from dstrain.config.errors import InputError


@contextmanager
def new_folder(out: str, key: str, needed_bytes: int) -> Iterator[Path]:
    """Yields a temporary folder beside `out`, which gets that name if nothing went wrong, and is removed otherwise.

    key: the configuration key of `out`, for errors. InputError where `out` is a file or a folder that is not empty, or
    cannot be made, or its disk has less than `needed_bytes` free.
    """
    target = Path(out).absolute()
    if target.is_symlink() or target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{key}={out}: exists and is not empty; valid: a new folder, or an empty one")
    prefix = f".{target.name}-{socket.gethostname()}-"
    temporary = target.parent / f"{prefix}{os.getpid()}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, prefix)
        temporary.mkdir()
    except OSError as error:
        raise InputError(f"{key}={out}: cannot be made there: {error.strerror}") from None
    try:
        free = shutil.disk_usage(temporary).free
        if free < needed_bytes:
            raise InputError(f"{key}={out}: no disk space: {needed_bytes:,} bytes needed, {free:,} bytes free")
        yield temporary
        sync(temporary)
        os.rename(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # there only after a failure


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """What killed processes of this host left for the same target; another host's process may live."""
    for path in parent.iterdir():
        number = path.name.removeprefix(prefix).removesuffix(".part")
        if path.name == f"{prefix}{number}.part" and number.isdecimal():
            if int(number) == os.getpid() or not process_lives(int(number)):  # ours does not exist yet
                shutil.rmtree(path, ignore_errors=True)
