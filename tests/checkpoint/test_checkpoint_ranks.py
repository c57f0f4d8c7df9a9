"""The format carries pieces of one global tensor from several ranks to another number of them (FAULTS A17).

The ranks write with DCP's own call and the storage that `tensors` chose; any layout reads them.
"""

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dstrain.checkpoint import load_tensors, tensor_names
from dstrain.checkpoint.files import seal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EXPERTS = torch.arange(4.0)[:, None, None].expand(4, 2, 3)  # expert i is filled with i
FLAT = torch.arange(7, dtype=torch.float64)  # a flattened moment; 7 does not divide by 2 ranks
DENSE = torch.full((5,), 3.0).bfloat16()


def rank_main(rank, folder, failures):
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
        mesh = dist.init_device_mesh("cpu", (2,))
        pieces = {
            "experts": distribute_tensor(EXPERTS.contiguous(), mesh, [Shard(0)]),
            "flat": distribute_tensor(FLAT, mesh, [Shard(0)]),
            "dense": DENSE,
        }
        dcp.save(
            pieces,
            storage_writer=HuggingFaceStorageWriter(f"{folder}/checkpoint/tensors", save_distributed=True),
            planner=DefaultSavePlanner(flatten_state_dict=False),
        )
        other = {"experts": distribute_tensor(torch.zeros(4, 2, 3), mesh, [Shard(1)])}
        dcp.load(
            other,
            storage_reader=HuggingFaceStorageReader(f"{folder}/checkpoint/tensors"),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
        )
        loaded: DTensor = other["experts"]
        assert torch.equal(loaded.to_local(), EXPERTS[:, rank : rank + 1])
        dist.destroy_process_group()
    except BaseException as error:
        failures.put(f"rank {rank}: {error!r}")
        os._exit(1)


def test_two_ranks_write_and_one_reads_every_expert_at_its_place(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    context = multiprocessing.get_context("forkserver")
    failures = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(rank, str(tmp_path), failures)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in ranks] == [0, 0]

    path = tmp_path / "checkpoint"
    seal(path)
    assert len(list((path / "tensors").iterdir())) == 2  # one file a rank
    assert tensor_names(path) == {
        "dense": ((5,), torch.bfloat16),
        "experts": ((4, 2, 3), torch.float32),
        "flat": ((7,), torch.float64),
    }
    wanted = {"experts": EXPERTS, "flat": FLAT, "dense": DENSE}
    into = {name: torch.full(tensor.shape, -1, dtype=tensor.dtype) for name, tensor in wanted.items()}
    load_tensors(path, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in wanted.items())
