"""Before the first step: what differs between ranks is refused by name, what is slow is named."""

import dataclasses
import platform
import time

import pytest
import torch
import torch.distributed as dist
from helpers import make_config
from launched import overrides, ranks
from ranks import spawn
from recorded import Recorder

from dstrain.config.errors import InputError, StoppedElsewhere
from dstrain.parallel.group import Group
from dstrain.parallel.layout import Layout
from dstrain.parallel.world import World
from dstrain.train.preflight import Measured, agree, code_digest, disk_lines, measure, memory_warnings, preflight, slow


def check(rank, size, config):
    world = World(rank, size, rank, size)
    world.start_group = Group(tuple(range(size)), rank, dist.group.WORLD)
    agree(world, {"the data": ("abc",), "the command line": ("run.steps=3", "model=tiny")})
    for facts, line in (
        ({"the data": ("abc" if rank < 2 else "abd",)},
         r"the data of rank 2 on \S+ is not that of rank 0 .*: abd there, abc here; so it is on 2"),
        ({"the command line": ("run.steps=3", f"optim.eps={1 + (rank == 1)}")},
         r"the command line of rank 1 .*: optim.eps=2 there, optim.eps=1 here; valid"),
        ({"the command line": ("a", "b")[:: -1 if rank == 3 else 1]}, "rank 3 .*: b a there, a b here"),
        ({"the command line": ("a", "b")[: 1 + (rank == 3)]}, r"rank 3 .*: b there, nothing more here"),
    ):
        with pytest.raises(InputError if rank == 0 else StoppedElsewhere) as error:
            agree(world, facts)
        if rank == 0:
            error.match(line)
    layout = Layout(config, size, rank, local_size=2)  # two nodes of two
    layout.connect(torch.device("cpu"))
    said = []
    assert preflight(world, layout, torch.device("cpu"), 1.0, said.append) == [platform.node()] * size
    assert said[-1].startswith("preflight: 4 ranks on 1 hosts in ")
    recorder = Recorder(config, "fp64", size, rank)
    read = recorder.stepper.micro_batches
    recorder.stepper.micro_batches = lambda *args: (time.sleep(1.0 if rank == 2 else 0.0), read(*args))[1]
    for _, row, *_ in recorder.steps(2):  # everyone's step takes a second longer, but one rank's own time alone
        assert row["slowest_rank"] == 2 and row["step_time"] > 1.0, row
        assert row["step_time_spread"] > 0.2, row  # all ranks take as long where waiting counts
    return measure(layout, torch.device("cpu"))


def test_ranks_agree_and_every_group_is_measured(tmp_path):
    config = make_config(tmp_path, "batch.sequences=8", "batch.micro_sequences=1")
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, pp=2, ep=2, timeout=60.0))
    measured = spawn(check, 4, config)
    for rank, of_rank in enumerate(measured):
        assert all(0 < speed < float("inf") for speed in of_rank.speeds.values())
        link = "between nodes" if rank in (0, 2) else "inside a node"  # from 3 to 0, from 1 to 2
        # the data group is the expert group here, so it is measured once
        assert set(of_rank.speeds) == {
            "TFLOPS of matrix products", f"GB/s from the rank before, {link}",
            *(f"GB/s of {what}, {group}" for what in ("all-reduce", "all-to-all")
              for group in ("all ranks group", "data group", "pipeline group")),
        }


def test_a_slow_rank_and_a_slow_link_are_named():
    everyone = [Measured(f"node{rank // 4}", "x", None, {"a": 10.0, "link": 8.0}) for rank in range(8)]
    everyone[5].speeds["a"] = 6.0
    everyone[2].speeds["link"], everyone[3].speeds["link"] = 1.0, 0.5
    assert slow(everyone, 2.0) == ["slow: rank 3 on node0 (0.5), rank 2 on node0 (1): link, the median is 8"]
    assert slow(everyone, 1.5)[0] == "slow: rank 5 on node1 (6): a, the median is 10"
    del everyone[3].speeds["link"]
    assert slow(everyone, 2.0) == ["slow: rank 2 on node0 (1): link, the median is 8"]


def test_memory_and_disk_against_need(tmp_path):
    free = (80 * 2**30, 20 * 2**30, None)
    everyone = [Measured(host, "H200", amount, {}) for host, amount in zip("nmm", free)]
    (line,) = memory_warnings(everyone, 30.0 * 2**30)
    assert line.startswith("rank 1 on m has 20.0 GiB of GPU memory free") and "about 30.0 GiB" in line
    assert disk_lines(tmp_path / "not/yet", 2**20, 3)[1] == []
    line, (warning,) = disk_lines(tmp_path, 2**60, 3)
    assert "4,294,967,296.00 GiB more needed" in line and warning.startswith(line)  # three and the one being made
    for step in range(3):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}/COMPLETE").touch()
    assert "1,073,741,824.00 GiB more needed" in disk_lines(tmp_path, 2**60, 3)[0]


def test_doctor_reports_and_train_refuses_a_rank_of_another_command_line(tmp_path):
    config = make_config(tmp_path, "batch.sequences=8", "batch.micro_sequences=1", "run.steps=1")
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, pp=2, timeout=60.0))
    with ranks(tmp_path, 2, overrides(config), command="doctor") as job:
        assert job.wait() == [0, 0], job.text()
    text = job.text()
    for words in ("2 ranks, 2 on ", f"code {code_digest()}", "GB/s of all-to-all, all ranks group: ", "kept: ",
                  "training tokens, the same", "GiB for weights, gradients and optimizer"):
        assert words in text, text
    assert "warnings" in text.splitlines()[-1 if text.splitlines()[-1] else -2] and not (tmp_path / "runs").exists()
    with ranks(tmp_path, 2, overrides(config), odd=("optim.eps=1e-7",)) as job:
        assert job.wait() == [2, 2], job.text()
    assert "the command line of rank 1 on " in job.text() and "optim.eps=1e-7 there" in job.text()
    assert not (tmp_path / "runs").exists()
