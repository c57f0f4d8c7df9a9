"""A new folder appears complete or not at all, and takes the room back that killed writers of the same folder took."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from dstrain.checkpoint.new_folder import new_folder

WRITER = """
import os, signal, sys
from dstrain.checkpoint.new_folder import new_folder
with new_folder(sys.argv[1], "out", 0) as folder:
    (folder / "model.safetensors").write_bytes(bytes(1000))
    print(folder, flush=True)
    os.kill(os.getpid(), signal.{signal})
    signal.pause()
"""


def start(out, signal_name):
    code = WRITER.format(signal=signal_name)
    writer = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True)
    return writer, writer.stdout.readline().strip()


def test_what_a_killed_writer_left_goes_when_the_next_one_starts(tmp_path):
    out = tmp_path / "model [1]"  # no pattern
    writer, left = start(out, "SIGKILL")
    assert writer.wait(60) == -signal.SIGKILL and os.path.exists(left)
    with new_folder(str(out), "out", 0) as folder:
        assert not os.path.exists(left)
        (folder / "done").touch()
    assert [path.name for path in tmp_path.iterdir()] == [out.name] and (out / "done").exists()


def test_folders_of_others_stay(tmp_path):
    """Of a writer that lives, of another host, of another target whose name begins alike, and whatever is no number."""
    writer, living = start(tmp_path / "out", "SIGSTOP")
    host = socket.gethostname()
    dead = subprocess.Popen(["true"])
    dead.wait(60)
    others = [f".out-{host}x-{dead.pid}.part", f".out-2-{host}-{dead.pid}.part", f".out-{host}-{dead.pid}x.part",
              f".out-{host}-{dead.pid}.part2"]
    for name in others:
        (tmp_path / name).mkdir()
    try:
        with new_folder(str(tmp_path / "out"), "out", 0):
            pass
        assert os.path.exists(living) and all((tmp_path / name).exists() for name in others)
    finally:
        writer.kill()
        writer.wait(60)


def test_after_a_failure_nothing_is_left(tmp_path):
    with pytest.raises(RuntimeError), new_folder(str(tmp_path / "out"), "out", 0):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
