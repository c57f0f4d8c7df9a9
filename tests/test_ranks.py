"""The helper that runs ranks: results by rank, failures with their traceback, and nothing that outlives it."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, spawn


def add(rank, size, more):
    total = torch.tensor([float(rank + more)])
    dist.all_reduce(total)
    return rank, size, total.item(), torch.get_num_threads()


def fail_on_rank_1(rank, size, how, slept):
    if rank == 1:
        if how == "raise":
            raise ValueError("a wrong number on rank one")
        os._exit(7)
    time.sleep(40)
    slept.touch()


def test_results_come_by_rank_from_processes_of_one_thread():
    assert spawn(add, 3, 10) == [(rank, 3, 33.0, 1) for rank in range(3)]


def test_a_failure_comes_back_with_its_traceback_and_ends_the_others(tmp_path):
    slept = tmp_path / "slept"
    with pytest.raises(RankFailure, match=r"(?s)rank 1: Traceback.*in fail_on_rank_1.*a wrong number on rank one"):
        spawn(fail_on_rank_1, 2, "raise", slept, timeout=100)
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        spawn(fail_on_rank_1, 2, "die", slept, timeout=100)
    assert not slept.exists()


def test_ranks_that_hang_are_killed():
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] were not done in time"):
        spawn(fail_on_no_rank, 2, timeout=4)


def fail_on_no_rank(rank, size):
    time.sleep(60)
