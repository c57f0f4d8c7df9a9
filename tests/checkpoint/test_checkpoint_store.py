"""Retention, replacement, failures that must not stop a run, damage, and what killed processes leave behind."""

import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from dstrain.checkpoint import CheckpointStore, CorruptCheckpoint, load_tensors
from dstrain.checkpoint import files as files_module
from dstrain.config.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def lines():
    return []


@pytest.fixture
def store(tmp_path, lines):
    return CheckpointStore(tmp_path / "checkpoints", keep=2, on_failure=lambda step, line: lines.append((step, line)))


def save(store, step, value=None):
    store.save(step, {"w": torch.full((1000,), float(step if value is None else value))}, {"step": step}, {"a": b"x"})
    return store.wait()


def value(path):
    into = {"w": torch.zeros(1000)}
    load_tensors(path, into)
    assert into["w"].eq(into["w"][0]).all()
    return into["w"][0].item()


def names(store):
    return sorted(os.listdir(store.root))


def test_the_newest_complete_ones_are_kept(store):
    for step in (1, 2, 30):
        assert save(store, step) is None
    assert store.steps() == [30, 2] and store.newest().name == "step-00000030"
    assert names(store) == ["step-00000002", "step-00000030"]
    assert save(store, 123456789) is None and store.steps() == [123456789, 30]


def test_retention_never_takes_what_was_just_saved(store):
    for step in (30, 31, 4):
        assert save(store, step) is None
    assert store.steps() == [31, 30, 4]


def test_the_old_one_is_removed_only_after_the_new_one_is_durable(store, monkeypatch):
    save(store, 1), save(store, 2)
    seen = []
    real = shutil.rmtree

    def rmtree(path, *args, **kwargs):
        if Path(path).exists():
            seen.append((Path(path).name.split("-")[0], store.steps()))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(store, 3)
    assert seen == [(".trash", [3, 2])]  # renamed out of the list before the first file goes


def test_every_file_reaches_the_disk_before_the_marker_and_the_marker_before_the_rename(store, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(source, target):
        events.append("rename")
        real_rename(source, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the names behind descriptors are read from /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(store, 1)
    renamed = events.index("rename")
    folder = events[renamed - 1]
    marker = events.index(f"{folder}/COMPLETE")
    inside = {f"{folder}/{path.relative_to(store.newest())}" for path in store.newest().rglob("*")}
    assert inside - {f"{folder}/COMPLETE"} | {folder} <= set(events[:marker])
    assert events[marker:] == [f"{folder}/COMPLETE", folder, "rename", str(store.root)]


def test_saving_a_step_again_replaces_it(store):
    save(store, 1), save(store, 2, value=5.0), save(store, 2, value=6.0)
    assert store.steps() == [2, 1] and value(store.newest()) == 6.0
    assert names(store) == ["step-00000001", "step-00000002"]


def test_a_replacement_that_fails_puts_the_former_one_back(store, monkeypatch):
    save(store, 2, value=5.0)
    real = os.rename

    def rename(source, target):
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert "Input/output error" in save(store, 2, value=6.0)
    assert names(store) == ["step-00000002"] and value(store.newest()) == 5.0


def test_a_second_save_waits_for_the_first(store, monkeypatch):
    gate, order = threading.Event(), []
    real = files_module.seal

    def seal(folder, known):
        order.append(folder.name.split("-")[2])
        gate.wait(20)
        real(folder, known=known)

    monkeypatch.setattr("dstrain.checkpoint.store.seal", seal)
    store.save(1, {"w": torch.ones(1000)}, {}, {})
    threading.Timer(0.3, gate.set).start()
    store.save(2, {"w": torch.ones(1000)}, {}, {})
    assert store.steps() == [1]
    assert store.wait() is None and store.steps() == [2, 1] and order == ["00000001", "00000002"]


def test_no_wait_is_endless_and_each_names_what_it_waits_for(store, lines, monkeypatch, capsys):
    gate = threading.Event()
    monkeypatch.setattr("dstrain.checkpoint.store.seal", lambda folder, known: gate.wait(20))
    store.save(7, {}, {}, {})
    assert f"checkpoint of step 7 in {store.root} was not written after 0.05 s" in store.wait(timeout=0.05)
    store.save(8, {}, {}, {}, timeout=0.05)  # the run goes on without this one
    assert lines[0][0] == 8 and "not started: checkpoint of step 7" in lines[0][1]
    gate.set()
    store.wait(timeout=20)


def test_no_disk_space_is_a_line_with_bytes_and_place_and_nothing_else(store, lines, monkeypatch):
    save(store, 1)
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    failure = save(store, 2)
    assert failure == store.failure and lines == [(2, failure)] and "\n" not in failure
    assert "step 2" in failure and "5,000 bytes free" in failure and str(store.root) in failure
    assert "bytes needed" in failure and store.steps() == [1] and value(store.newest()) == 1
    with pytest.raises(InputError, match=r"5,001 bytes needed, 5,000 bytes free"):
        store.check_space(5001)
    store.check_space(5000)
    monkeypatch.undo()
    assert save(store, 3) is None and store.failure is None and store.steps() == [3, 1]


def test_space_is_checked_where_the_folder_will_be(tmp_path):
    CheckpointStore(tmp_path / "not" / "yet", keep=2).check_space(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file, not a folder"):
        CheckpointStore(tmp_path / "file" / "checkpoints", keep=2).check_space(1)


@pytest.mark.parametrize("victim", ["tensors", "file", "marker", "fsync", "rename"])
def test_a_write_error_keeps_the_run_and_the_older_checkpoints(store, lines, monkeypatch, victim):
    save(store, 1)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args, **kwargs):
        raise full

    if victim == "tensors":
        monkeypatch.setattr("dstrain.checkpoint.safetensors_file.SafetensorsWriter.write", fail)
    elif victim == "file":
        monkeypatch.setattr("dstrain.checkpoint.store.write_file", fail)
    elif victim == "marker":
        monkeypatch.setattr("dstrain.checkpoint.files.write_file", fail)
    else:
        monkeypatch.setattr(os, victim, fail)
    failure = save(store, 2)
    assert lines == [(2, failure)] and "\n" not in failure
    assert "step 2" in failure and "No space left on device" in failure
    assert names(store) == ["step-00000001"] and value(store.newest()) == 1
    monkeypatch.undo()
    assert save(store, 3) is None and store.steps() == [3, 1]


def test_an_old_checkpoint_that_cannot_be_deleted_is_told_and_the_new_one_counts(store, lines, monkeypatch):
    save(store, 1), save(store, 2)
    real = shutil.rmtree

    def rmtree(path, *args, **kwargs):
        if ".trash-" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert save(store, 3) is None and store.steps() == [3, 2]
    assert "step 3 is saved" in lines[0][1] and "Permission denied" in lines[0][1]


def tensor_file(path):
    return next((path / "tensors").iterdir())


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "flipped bit in tensors": (lambda path: flip(tensor_file(path)), "shard-.*checksum differs"),
    "truncated tensors": (lambda path: truncate(tensor_file(path)), r"shard-.*size is \d+ bytes, not \d+"),
    "missing tensors": (lambda path: tensor_file(path).unlink(), "shard-.*the file is missing"),
    "foreign tensors": (
        lambda path: shutil.copy(tensor_file(path), path / "tensors/more.safetensors"),
        "more.safetensors: the file does not belong",
    ),
    "flipped bit in meta": (lambda path: flip(path / "meta.json"), "meta.json: its checksum differs"),
    "flipped bit in file": (lambda path: flip(path / "files/a"), "files/a: its checksum differs"),
    "flipped bit in sums": (lambda path: flip(path / "checksums.json"), "checksums.json: its checksum is not"),
    "missing sums": (lambda path: (path / "checksums.json").unlink(), "checksums.json: the file is missing"),
    "empty marker": (lambda path: (path / "COMPLETE").write_bytes(b""), "checksums.json: its checksum is not"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_previous_checkpoint_is_taken_loudly(store, lines, damage):
    save(store, 1), save(store, 2)
    harm, pattern = DAMAGE[damage]
    harm(store.newest())
    with pytest.raises(CorruptCheckpoint, match=pattern) as error:
        store.verify(store.newest())
    assert "step-00000002" in str(error.value) and "\n" not in str(error.value)
    told = []
    path = store.open_newest(told.append)
    assert path.name == "step-00000001" and value(path) == 1
    assert len(told) == 1 and str(error.value) in told[0] and "CORRUPT" in told[0]
    assert names(store) == ["step-00000001", "step-00000002.corrupt"] and store.steps() == [1]
    # The run reaches step 2 again, and that one breaks too.
    save(store, 2)
    flip(tensor_file(store.newest()))
    assert store.open_newest(told.append).name == "step-00000001"
    assert "step-00000002.corrupt-2" in names(store)


def test_an_intact_checkpoint_is_opened_in_silence(store):
    save(store, 1)
    told = []
    assert store.open_newest(told.append) == store.newest() and told == []
    (store.newest() / ".DS_Store").write_bytes(b"a desktop was here")
    store.verify(store.newest())


def test_when_all_are_corrupt_the_run_does_not_start_anew_silently(store):
    save(store, 1), save(store, 2)
    for step in (1, 2):
        flip(tensor_file(store.root / f"step-0000000{step}"))
    for _ in range(2):  # the second start finds only what the first one has set aside
        with pytest.raises(InputError, match=r"no intact checkpoint in .*2 corrupt.*choose another run.name"):
            store.open_newest(lambda line: None)


def test_nothing_there_is_not_an_error(store):
    assert store.open_newest(print) is None and store.newest() is None and store.steps() == []


def test_a_folder_without_marker_is_ignored_aloud_and_can_be_saved_over(store):
    save(store, 1), save(store, 2)
    (store.newest() / "COMPLETE").unlink()
    (store.root / "step-abc").mkdir()
    (store.root / "step-00000009").write_text("a file")
    told = []
    assert store.steps() == [1] and store.open_newest(told.append).name == "step-00000001"
    assert len(told) == 1 and "step-00000002 is ignored" in told[0]
    assert save(store, 2) is None and store.steps() == [2, 1]


def test_a_damaged_disk_block_falls_back_but_a_lack_of_permission_does_not_condemn(store, monkeypatch):
    save(store, 1), save(store, 2)
    real, error = files_module._digest, OSError(errno.EIO, "Input/output error", "block")

    def digest(path, *args):
        if "step-00000002" in str(path):
            raise error
        return real(path, *args)

    monkeypatch.setattr(files_module, "_digest", digest)
    error = PermissionError(errno.EACCES, "Permission denied", "tensors")
    with pytest.raises(InputError, match="no permission"):
        store.open_newest(print)
    assert store.steps() == [2, 1]
    error = OSError(errno.EIO, "Input/output error", "block")
    assert store.open_newest(lambda line: None).name == "step-00000001"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(store):
    save(store, 1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host = socket.gethostname()

    def leave(kind, pid, host=host):
        path = store.root / f".{kind}-step-00000005-{host}-{pid}"
        shutil.copytree(store.root / "step-00000001", path)
        return path

    gone = [leave("tmp", dead.pid), leave("trash", dead.pid), leave("tmp", os.getpid())]
    stay = [leave("tmp", living.pid), leave("tmp", dead.pid, "another-host")]
    told = []
    try:
        store.open_newest(told.append)
    finally:
        living.communicate(b"\n")
    assert not any(path.exists() for path in gone) and all(path.exists() for path in stay)
    assert len(told) == 1 and "another-host" in told[0]
    assert store.steps() == [1]


def test_the_folder_that_this_process_is_writing_stays(store, monkeypatch):
    save(store, 1)
    gate, entered = threading.Event(), threading.Event()
    real = files_module.seal

    def seal(folder, known):
        entered.set()
        gate.wait(20)
        real(folder, known=known)

    monkeypatch.setattr("dstrain.checkpoint.store.seal", seal)
    store.save(2, {"w": torch.ones(1000)}, {}, {})
    entered.wait(20)
    CheckpointStore(store.root, keep=2).open_newest(print)
    gate.set()
    assert store.wait() is None and store.steps() == [2, 1]


def test_a_replacement_cut_between_its_renames_is_undone(store):
    save(store, 1), save(store, 2)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    os.rename(store.newest(), store.root / f".old-step-00000002-{socket.gethostname()}-{dead.pid}")
    assert store.open_newest(print).name == "step-00000002" and value(store.newest()) == 2
