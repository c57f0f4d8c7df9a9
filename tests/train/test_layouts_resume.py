"""Any layout of ranks resumes what any other has saved, bit for bit (FAULTS A17, B24, C07).

Every saved value is a function of its place in the whole tensor, so whatever lands elsewhere shows.
"""

from pathlib import Path

import pytest
import sharded
import torch
from layouts import LAYOUTS
from ranks import spawn

from dstrain.checkpoint import load_tensors, tensor_names
from dstrain.checkpoint.files import CorruptCheckpoint
from dstrain.checkpoint.reader import CheckpointReader
from dstrain.checkpoint.store import CheckpointStore
from dstrain.config.errors import InputError
from dstrain.parallel.world import StoppedElsewhere
from dstrain.train.state import initialise, restore, run_tensors

FP64, BF16 = {"precision": "fp64"}, {"precision": "bf16", "moments": "bf16"}
FRESH = 999  # the seed of a rank before it resumes


def save(model, optimizer, root, data_ranks_seed=100):
    mesh = optimizer.replicas.mesh
    store = CheckpointStore(root, keep=2, ranks=mesh.host_group, timeout=60)
    torch.manual_seed(data_ranks_seed + mesh.data_rank)
    store.save(1, run_tensors(model, optimizer), {"dp": mesh.dp}, {"a": b"x"})
    assert store.wait() is None
    return store.newest()


def resume(path, wanted, replicas=None, **kinds):
    """Restore into fresh tensors and compare with the tree `wanted`; the generator too."""
    model, optimizer = sharded.build(replicas, **kinds)
    sharded.overwrite(model, optimizer, -7.0)
    torch.manual_seed(FRESH)
    restore(model, optimizer, path)
    sharded.check_equal(model, optimizer, wanted)
    data_rank = optimizer.replicas.mesh.data_rank
    seed = 100 + data_rank if data_rank < CheckpointStore.meta(path)["dp"] else FRESH
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    return model, optimizer


def save_and_resume(rank, size, root):
    """Every layout saves; each resumes what the one before it has saved, the last also what was there."""
    wanted = sharded.tree(*sharded.numbered(**FP64))
    others = sorted(Path(root).iterdir())[::3]
    paths = []
    everyone = {name: layout.connected(size, rank) for name, layout in LAYOUTS[size].items()}
    for name, replicas in everyone.items():
        model, optimizer = sharded.build(replicas, **FP64)
        sharded.take(model, optimizer, wanted)
        paths.append(save(model, optimizer, Path(root) / f"{size}, {name}"))
    for replicas, path in zip(everyone.values(), paths[-1:] + paths):
        resume(path, wanted, replicas, **FP64)
    for other in others:
        resume(CheckpointStore(other, 2).newest(), wanted, replicas, **FP64)
    between_precisions(replicas, Path(root).parent / f"bf16 of {size}", paths[0], wanted)
    check_initial(replicas)


def between_precisions(replicas, root, path_fp64, wanted_fp64):
    """BF16 weights with masters there and back; the masters are what FP64 goes on with, and the other way round."""
    wanted = sharded.tree(*sharded.numbered(**BF16))
    model, optimizer = sharded.build(replicas, **BF16)
    sharded.take(model, optimizer, wanted)
    path = save(model, optimizer, root)
    resume(path, wanted, replicas, **BF16)
    resume(path_fp64, wanted, replicas, **BF16)  # its values, rounded to FP32 masters, BF16 weights and moments
    names = [name for name in wanted if not name.startswith(("master.", "exp_avg"))]
    wide = {name: tensor.double() if "bias" not in name else tensor for name, tensor in wanted.items()}
    wide |= {n: wide[f"master.{n}"].view(wanted[n].shape) for n in names if f"master.{n}" in wanted}
    resume(path, wide, replicas, **FP64)


def check_initial(replicas):
    """FAULTS B24: a layout begins with the slices of what one process begins with."""
    model, optimizer = sharded.build()
    initialise(model, optimizer, seed=5)
    wanted = sharded.tree(model, optimizer)
    model, optimizer = sharded.build(replicas)
    initialise(model, optimizer, seed=5)
    sharded.check_equal(model, optimizer, wanted)


def test_any_layout_resumes_any_other(tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    wanted = sharded.tree(*sharded.numbered(**FP64))
    save(*sharded.numbered(**FP64), root / "1")
    spawn(save_and_resume, 4, str(root))
    spawn(save_and_resume, 2, str(root))
    assert len(list(root.iterdir())) == 1 + len(LAYOUTS[4]) + len(LAYOUTS[2])
    single = tensor_names(CheckpointStore(root / "1", 2).newest())
    for run in root.iterdir():
        path = CheckpointStore(run, 2).newest()
        resume(path, wanted, **FP64)
        kinds = {name: kind for name, kind in tensor_names(path).items() if not name.startswith("rng.cpu.")}
        assert kinds == single, run.name  # nothing but the names and shapes of one process
        generators = sum(name.startswith("rng.cpu") for name in tensor_names(path))
        assert generators == CheckpointStore.meta(path)["dp"], run.name  # one a data rank, not one a rank
        # No copy is written twice, and PyTorch's own reader finds the same values.
        into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_names(path).items()}
        files = sum(file.stat().st_size for file in (path / "tensors").iterdir())
        assert files < sum(tensor.nbytes for tensor in into.values()) + 300 * len(into) * 4
        load_tensors(path, into)
        for name in sharded.SHAPES:
            assert torch.equal(into[name], wanted[name]), (run.name, name)
            assert torch.equal(into[f"optimizer.exp_avg.{name}"], wanted[f"exp_avg.{name}"]), (run.name, name)


def damaged(rank, size, root):
    """What is wrong with a checkpoint ends all ranks alike, with one line; or all take the one before it."""
    replicas = LAYOUTS[2]["ep 2"].connected(size, rank)
    model, optimizer = sharded.build(replicas)
    store = CheckpointStore(Path(root), keep=3, ranks=replicas.mesh.host_group, timeout=60)
    for step in (1, 2, 3):
        store.save(step, run_tensors(model, optimizer), {}, {})
        assert store.wait() is None
    host = replicas.mesh.host_group
    host.gather_objects(0, "everyone is here")
    if rank == 0:
        next((Path(root) / "step-00000003/tensors").glob("shard-00002-*")).write_bytes(b"damage")
    told = []
    assert store.open_newest(told.append).name == "step-00000002"
    assert len(told) == (1 if rank == 0 else 0)

    def refused(step, error, tells):
        """Rank `tells` raises `error`, the other ends in silence."""
        with pytest.raises(error if rank == tells else StoppedElsewhere):
            restore(model, optimizer, Path(root) / f"step-{step:08}")
        host.gather_objects(0, "both are refused")

    def fail(self, file):
        raise OSError(5, "Input/output error")

    stored = CheckpointReader._stored
    CheckpointReader._stored = fail if rank == 1 else stored  # a disk that fails under one rank's load
    refused(2, CorruptCheckpoint, tells=1)
    CheckpointReader._stored = stored
    restore(model, optimizer, Path(root) / "step-00000002")
    store.save(1, {**run_tensors(model, optimizer), f"more.{rank}": torch.zeros(1)}, {}, {})
    assert store.wait() is None
    refused(1, InputError, tells=0)
    refused(7, InputError, tells=0)
    if rank == 0:
        for step in (1, 2):
            for file in (Path(root) / f"step-0000000{step}/tensors").iterdir():
                file.write_bytes(b"damage")
    with pytest.raises(InputError if rank == 0 else StoppedElsewhere):
        store.open_newest(told.append)


def test_a_corrupt_checkpoint_is_refused_on_all_ranks_alike(tmp_path):
    spawn(damaged, 2, str(tmp_path))


def test_a_checkpoint_of_another_model_or_with_too_many_tensors_is_refused(tmp_path):
    model, optimizer = sharded.numbered()
    path = save(model, optimizer, tmp_path / "whole")
    tensors = run_tensors(model, optimizer)
    for name, value, message in (
        ("more", torch.zeros(3), r"1 tensor unknown here \(more\)"),
        ("optimizer.master.more", torch.zeros(3), r"1 tensor unknown here \(optimizer.master.more\)"),
        ("model.norm.weight", torch.zeros(3), r"of another shape or dtype \(model.norm.weight: float32\[3\] there"),
        ("optimizer.exp_avg_sq.model.norm.weight", None, r"1 tensor missing there \(optimizer.exp_avg_sq.model.norm"),
        ("rng.cpu", None, r"1 tensor missing there \(rng.cpu\)"),
    ):
        store = CheckpointStore(tmp_path / name, keep=2)
        changed = {**tensors, name: value}
        store.save(1, {key: tensor for key, tensor in changed.items() if tensor is not None}, {}, {})
        assert store.wait() is None
        with pytest.raises(InputError, match=message):
            restore(*sharded.build(), store.newest())
    resume(path, sharded.tree(model, optimizer))
