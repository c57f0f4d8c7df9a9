"""DualPipe on 2 pipeline ranks times 2 expert ranks: both kinds of communication at once, against the single process.

rank = pipeline rank · 2 + expert rank. Every pipeline has its own micro-batches; the right values are one process's on
all of them, in float64. Expert ranks hold different experts, so these gradients are joined, all others added up.
"""

import pytest
import torch
import torch.distributed as dist
from pipelines import CONFIG, DEVICE, Rank, loss_weights, make_batches, results, single_process
from ranks import spawn

from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.payload import PAYLOADS

HALVES = [range(0, 4), range(4, 8)]


def batches_of(pipeline: int):
    return make_batches(CONFIG, 6, seed=20 + pipeline)


def run(rank, world):
    """-> this rank's results with overlap and without."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found, expert_rank = {}, rank % 2
    for overlap in (True, False):
        dispatcher = AllToAllDispatcher(groups[rank // 2], 8, PAYLOADS["compute"], DEVICE)
        one = Rank(
            "dualpipe", 2, 6, CONFIG, "fp64", rank, world,
            apart=True, experts=HALVES[expert_rank], dispatcher=dispatcher, overlap=overlap,
        )  # fmt: skip
        weights = loss_weights(CONFIG, batches_of(0) + batches_of(1))
        one.executor.train(batches_of(expert_rank), one.sums, weights, step=1)
        found[overlap] = results(one.model, one.sums)
    return found


@pytest.fixture(scope="module")
def of_ranks():
    return spawn(run, 4, timeout=120)


def test_pipeline_and_expert_ranks_together_equal_the_single_process(of_ranks):
    expected = single_process(CONFIG, "fp64", batches_of(0) + batches_of(1))
    found = [one[True] for one in of_ranks]
    torch.testing.assert_close(sum(one["losses"] for one in found), expected["losses"], rtol=1e-12, atol=0)
    for layer, load in expected["loads"].items():
        assert torch.equal(sum(one["loads"][layer] for one in found if layer in one["loads"]), load)
    for name, right in expected["grads"].items():
        copies = {rank: one["grads"][name] for rank, one in enumerate(found) if name in one["grads"]}
        if ".mlp.experts." in name:
            halves = [sum(copy for rank, copy in copies.items() if rank % 2 == half) for half in range(2)]
            got = torch.cat(halves)
        else:
            got = sum(copies.values())
        assert (got - right).abs().max() <= 1e-9 * right.abs().max(), name


def test_overlap_changes_no_bit_with_experts_elsewhere(of_ranks):
    for one in of_ranks:
        assert torch.equal(one[True]["losses"], one[False]["losses"])
        assert all(torch.equal(one[True]["grads"][name], grad) for name, grad in one[False]["grads"].items())
