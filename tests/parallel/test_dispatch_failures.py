"""A rank that is missing or dies ends the others' wait with its name; loads can be stated where there is no data."""

import os
import signal
import time
from datetime import timedelta

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from dstrain.parallel.dispatch import Done
from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.dispatch_nodes import NodeLimitedDispatcher
from dstrain.parallel.group import CommunicationError
from dstrain.parallel.payload import PAYLOADS

CPU, COMPUTE = torch.device("cpu"), PAYLOADS["compute"]
IDS = torch.tensor([[0, 1, 2]])


def rank_1_is_missing(rank: int, size: int):
    """Rank 1 takes part in the sizes and not in the dispatch. -> on rank 0 the error."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    dist.barrier()
    route = AllToAllDispatcher(group, 1, COMPUTE, CPU).route(IDS, 4)
    route.sizes = Done(route.sizes.wait())
    flag = torch.zeros(1)
    if rank == 1:
        dist.recv(flag, src=0)  # until rank 0 is through
        return None
    try:
        route.dispatch(torch.ones(1, 5), torch.ones(1, 3)).wait()
    except CommunicationError as failure:
        return str(failure)
    finally:
        dist.send(flag, dst=1)


def test_a_missing_rank_ends_the_wait_at_the_groups_timeout_and_the_error_says_in_what():
    text, _ = ranks.spawn(rank_1_is_missing, 2, timeout=60)  # longer than the group's timeout by far
    assert text.startswith(
        "rank 0 waited for ranks [0, 1] in dispatch: "
        "all-to-all number 2 of this group, 3 rows out, 4 rows in, 32 bytes each: "
    )


def rank_3_dies(rank: int, size: int) -> None:
    dispatcher = NodeLimitedDispatcher(dist.group.WORLD, 2, COMPUTE, CPU, timedelta(seconds=20))
    route = dispatcher.route(IDS.expand(2, -1), 4)
    rows, _ = route.dispatch(torch.ones(2, 5), torch.ones(2, 3)).wait()
    if rank == 3:
        time.sleep(0.3)  # the others shall be waiting
        os.kill(os.getpid(), signal.SIGKILL)
    route.combine(rows).wait()
    route.dispatch_backward(rows, torch.ones(len(rows))).wait()


def test_a_killed_rank_ends_the_others(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE", 40)  # all of them report
    with pytest.raises(ranks.RankFailure, match="rank 3: died with exit code -9") as failure:
        ranks.spawn(rank_3_dies, 4, timeout=60)
    for rank in range(3):
        assert f"CommunicationError: rank {rank} waited for ranks [" in str(failure.value)


class Flat(AllToAllDispatcher):
    """Loads of a rehearsal: every rank sends 5 rows to each expert."""

    def host_counts(self, counts):
        return Done(np.full(counts.shape, 5))


class Nodes(NodeLimitedDispatcher):
    """As Flat; 7 tokens go to each node."""

    def host_counts(self, counts):
        loads = np.full(counts.shape, 5)
        loads[..., 0] = 7
        return Done(loads)


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Flat, Nodes])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_rehearsal_without_data_states_its_loads(fake_world, kind, payload):
    """8 experts on 4 ranks, so 4 · 5 rows reach each of this rank's 2; filled up to 24."""
    more = [timedelta(seconds=5)] if kind is Nodes else []
    dispatcher = kind(dist.group.WORLD, 2, PAYLOADS[payload], CPU, *more, alignment=8)
    with FakeTensorMode():
        route = dispatcher.route(torch.zeros(16, 3, dtype=torch.int64), 8)
        x = torch.empty(16, 256, dtype=torch.bfloat16)
        rows, weights = route.dispatch(x, torch.empty(16, 3)).wait()
        assert rows.shape == (48, 256) and rows.dtype == torch.bfloat16 and weights.shape == (48,)
        assert route.combine(rows).wait().shape == x.shape
        assert route.combine_backward(x).wait().shape == rows.shape
        grad_x, grad_weights = route.dispatch_backward(rows, weights).wait()
        assert grad_x.shape == x.shape and grad_weights.shape == (16, 3) and grad_weights.dtype == torch.float32
    state = 512 if payload == "compute" else 256 + 8
    # Over the slow link: to 2 ranks of 2 experts each, 5 rows an expert; or 7 tokens with 3 weights and 3 ids.
    right = 4 * 5 * (state + 8) if kind is Flat else 7 * (state + 16 + 16)
    assert dispatcher.traffic.metrics()["dispatch_slow_bytes"] == right
