"""Several ranks save one checkpoint: each its pieces, all or nothing, and one line where it fails (FAULTS A17, C01)."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import RankFailure, spawn

from dstrain.checkpoint import CheckpointStore, load_tensors, parts, tensor_names
from dstrain.checkpoint import store as store_module
from dstrain.checkpoint.reader import CheckpointReader
from dstrain.checkpoint.safetensors_file import SafetensorsWriter
from dstrain.checkpoint.tensors import Piece, write_tensors
from dstrain.parallel.mesh import Mesh

EXPERTS = torch.arange(4.0)[:, None, None].expand(4, 2, 3)  # expert i is filled with i
FLAT = torch.arange(7, dtype=torch.float64)  # a flattened moment; 7 does not divide by 2 ranks
DENSE = torch.full((5,), 3.0).bfloat16()
CUTS = [0, 2, 7]


def pieces(rank):
    """Rank 0 has two experts, 2 elements of the moment and the dense weight, rank 1 the rest."""
    first, end = CUTS[rank], CUTS[rank + 1]
    mine = {
        "experts": Piece(EXPERTS[2 * rank : 2 * rank + 2], (4, 2, 3), (2 * rank, 0, 0)),
        "flat": Piece(FLAT[first:end].clone(), (7,), (first,)),
    }
    return {**mine, "dense": DENSE} if rank == 0 else mine


def make_store(rank, size, root, timeout=60.0):
    lines = []
    mesh = Mesh(size, rank)
    mesh.connect(timedelta(seconds=60))
    store = CheckpointStore(
        Path(root), keep=2, on_failure=lambda step, line: lines.append(line), ranks=mesh.host_group, timeout=timeout
    )
    return store, lines


def save_pieces(rank, size, root):
    store, lines = make_store(rank, size, root)
    tensors = pieces(rank)
    store.save(1, tensors, {"from": rank}, {"name": str(rank).encode()})
    tensors["flat"].tensor.zero_()  # it is a copy that is written
    assert store.wait() is None and store.steps() == [1] and not lines
    # Another layout: the moment from its third element on, one expert.
    reader = CheckpointReader(store.newest())
    into = torch.zeros(4)
    reader.fill_range("flat", into, 1 + rank)
    assert into.tolist() == [1.0 + rank, 2.0 + rank, 3.0 + rank, 4.0 + rank]
    assert reader.read("experts", 1 + rank, 2).flatten(1).unique(dim=1).tolist() == [[1.0 + rank], [2.0 + rank]]
    into = torch.zeros(8)
    reader.fill_range("experts", into, 4)  # the last two of expert 0, and expert 1
    assert into.tolist() == [0.0] * 2 + [1.0] * 6


def test_two_ranks_write_and_one_reads_every_expert_at_its_place(tmp_path):
    spawn(save_pieces, 2, str(tmp_path))
    path = CheckpointStore(tmp_path, 2).newest()
    CheckpointStore.verify(path)
    assert sorted(file.name for file in path.iterdir()) == [
        "COMPLETE", "checksums.json", "files", "meta.json", "tensors",
    ]
    assert len(list((path / "tensors").iterdir())) == 2  # one file a rank
    assert CheckpointStore.meta(path) == {"from": 0} and CheckpointStore.file(path, "name") == b"0"
    assert tensor_names(path) == {
        "dense": ((5,), torch.bfloat16),
        "experts": ((4, 2, 3), torch.float32),
        "flat": ((7,), torch.float64),
    }
    wanted = {"experts": EXPERTS, "flat": FLAT, "dense": DENSE}
    into = {name: torch.full(tensor.shape, -1, dtype=tensor.dtype) for name, tensor in wanted.items()}
    load_tensors(path, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in wanted.items())


def test_a_piece_lies_inside_its_tensor():
    with pytest.raises(ValueError, match=r"a piece \[4\] at \(4,\) leaves its tensor \(7,\)"):
        Piece(FLAT[:4], (7,), (4,))


def fail_on_one_rank(rank, size, root):
    """Every way in which one of three ranks spoils a save; the run goes on, the next save is whole."""
    store, lines = make_store(rank, size, root, timeout=2.0)

    def save(step):
        store.save(step, {"w": Piece(torch.ones(2) * rank, (6,), (2 * rank,))}, {}, {})
        return store.wait()

    def spoilt(step, expected):
        line = save(step)
        assert line == store.failure and f"checkpoint of step {step} was not saved" in line and expected in line
        assert "\n" not in line and store.ranks.gather_objects(line, "lines") == [line] * 3
        assert lines == ([line] if rank == 0 else [])
        lines.clear()
        assert store.steps()[0] == step - 1
        assert save(step) is None and store.failure is None and store.steps()[0] == step
        assert {path.name[:5] for path in Path(root).iterdir()} == {"step-"}

    assert save(1) is None
    real_write, real_report, real_seal = store_module.write_tensors, parts.report, store_module.seal

    def once(function, real, name, module):
        """`function` in the place of module.name, for one call."""
        def call(*args, **kwargs):
            setattr(module, name, real)
            return function(*args, **kwargs)
        setattr(module, name, call)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if rank == 2:
        once(full, real_write, "write_tensors", store_module)
    spoilt(2, "rank 2: OSError: [Errno 28] No space left on device")
    if rank == 1:  # writes and says nothing, as a rank that hangs
        once(lambda *args: None, real_report, "report", parts)
    spoilt(3, "after 2 s no part has come from rank 1")
    if rank == 0:
        once(full, real_seal, "seal", store_module)
    spoilt(4, "OSError: [Errno 28] No space left on device")
    if rank == 0:
        once(full, store.check_space, "check_space", store)
    spoilt(5, "No space left on device")
    gate = threading.Event()  # rank 1 is slow: the next save is not started on any rank, this one is completed
    if rank == 1:
        once(lambda *args: (gate.wait(30), real_write(*args))[1], real_write, "write_tensors", store_module)
    store.timeout = 60.0
    store.save(6, {"w": Piece(torch.ones(2) * rank, (6,), (2 * rank,))}, {}, {})
    store.save(7, {}, {}, {}, timeout=0.1)
    assert "step 7 was not saved" in store.failure and "not started: checkpoint of step 6" in store.failure
    assert lines == ([store.failure] if rank == 0 else [])
    gate.set()
    assert store.wait() is None and store.steps()[0] == 6


def test_a_rank_that_fails_or_hangs_fails_the_save_of_all_with_one_line(tmp_path):
    spawn(fail_on_one_rank, 3, str(tmp_path))
    path = CheckpointStore(tmp_path, 2).newest()
    into = {"w": torch.zeros(6)}
    load_tensors(path, into)
    assert into["w"].tolist() == [0, 0, 1, 1, 2, 2]


def die_while_saving(rank, size, root, victim):
    store, _ = make_store(rank, size, root)
    tensors = pieces(rank)
    for step in (1, 2):
        store.save(step, tensors, {}, {})
        assert store.wait() is None
    if rank == victim:
        at = "report" if rank else "collect"
        setattr(parts, at, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    store.save(3, tensors, {}, {})
    store.wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path, victim):
    with pytest.raises(RankFailure, match=f"rank {victim}: died with exit code -9"):
        spawn(die_while_saving, 2, str(tmp_path), victim)
    store = CheckpointStore(tmp_path, 2)
    told = []
    path = store.open_newest(told.append)
    assert path.name == "step-00000002" and told == []
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    into = {"flat": torch.zeros(7, dtype=torch.float64)}
    load_tensors(path, into, prefixes=["flat"])
    assert torch.equal(into["flat"], FLAT)


def test_a_part_counts_as_written_even_if_the_first_rank_clears_up_at_once(tmp_path, monkeypatch):
    """The moment a part has its name, the first rank may have heard from all and delete what they wrote to it."""
    folder, rename, heard = tmp_path / "save", os.rename, []
    parts.make(folder, ranks=2)

    def rename_and_collect(source, target):
        rename(source, target)
        heard.append(parts.collect(folder, [1], timeout=1.0))

    monkeypatch.setattr(os, "rename", rename_and_collect)
    parts.report(folder, 1, {"tensors/a": "sum"})
    assert heard == [{"tensors/a": "sum"}] and not (folder / parts.PARTS).exists()


def test_a_failure_is_heard_on_a_disk_that_takes_no_byte(tmp_path, monkeypatch):
    """A new name may not fit at first either: it is tried again."""
    folder, touch, tried = tmp_path / "save", Path.touch, []
    parts.make(folder, ranks=3)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def touch_later(path):
        tried.append(path)
        touch(path) if len(tried) == 3 else full()

    monkeypatch.setattr(parts, "write_file", full)
    monkeypatch.setattr(Path, "touch", touch_later)
    why = "OSError: [Errno 28] No space left on device: '/one/ö%two'"
    parts.report_failure(folder, 2, why, timeout=20)
    with pytest.raises(RuntimeError) as caught:
        parts.collect(folder, [1, 2], timeout=20)
    assert str(caught.value) == f"rank 2: {why}" and len(tried) == 3

    monkeypatch.setattr(Path, "touch", touch)
    parts.report_failure(folder, 1, 300 * "ö", timeout=20)
    with pytest.raises(RuntimeError, match=r"^rank 1: ö{30,}$"):
        parts.collect(folder, [1], timeout=20)
    parts.report_failure(tmp_path / "gone", 1, why, timeout=3600)  # nobody waits any more


def test_a_rank_that_cannot_write_its_tensors_leaves_their_room_to_the_others(tmp_path, monkeypatch):
    parts.make(tmp_path / "save", ranks=2)
    tensors = tmp_path / "save" / "tensors"
    written = write_tensors(tmp_path / "save", {"a": torch.ones(3)}, 0)

    def write(writer, name, tensor):
        assert len(list(tensors.iterdir())) == 2
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SafetensorsWriter, "write", write)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "save", {"b": torch.ones(3)}, 1)
    assert [f"tensors/{path.name}" for path in tensors.iterdir()] == list(written)
