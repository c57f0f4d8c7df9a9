"""ZeRO-1 over gloo ranks gives what one process gives: weights and moments bit for bit, norms to 1e-12.

The right values are those of the single process on the same sums of whole numbers (`sharded`).
"""

import math
from datetime import timedelta

import pytest
import sharded
import torch
from layouts import CONFIG, LAYOUTS, TIMEOUT
from ranks import spawn
from sharded import GRAD_SCALE, LEARNING_RATE, SEED, UPDATES

from dstrain.parallel.buckets import ALIGN
from dstrain.parallel.group import CommunicationError
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.totals import total_counts, total_loads, total_sums
from dstrain.train.state import initialise


def in_halves(names, rank):
    """Parameters as two stages complete them, on every other rank the second stage first."""
    halves = [n for n in names if n < "model.layers.2"], [n for n in names if n >= "model.layers.2"]
    return halves[:: 1 if rank % 2 else -1]


def train(rank, size, layout, wanted, **kinds):
    """-> the bits of the norms, the bytes of this rank's masters and moments, and what of each parameter it updates."""
    model, optimizer = sharded.build(layout.connected(size, rank), **kinds)
    initialise(model, optimizer, SEED)
    names, norms = list(optimizer.states), []
    bad = names[len(names) // 2]
    for update in range(1, UPDATES + 1):
        if update == 2:  # a step that one rank's NaN spoils for all
            sharded.add_gradients(model, optimizer, update)
            if rank == size - 1:
                optimizer.states[bad].parameter.main_grad.view(-1)[0] = math.nan
            optimizer.ready(names[3:9])
            norms.append(optimizer.grad_norm().item())
            optimizer.zero_grad()
        sharded.add_gradients(model, optimizer, update)
        if update > 1:  # and once everything is left to the end
            for half in in_halves(names, rank):
                optimizer.ready(half)
        norms.append(optimizer.grad_norm().item())
        assert norms[-1] == optimizer.grad_norm().item()
        optimizer.step(LEARNING_RATE, update, GRAD_SCALE)
        assert all(not bucket.grads.any() for bucket in optimizer.buckets)
    for router, number in zip(model.routers, model.moe_layers):
        router.e_score_correction_bias.copy_(torch.arange(8.0) + number - CONFIG.first_k_dense_replace)
    sharded.check_equal(model, optimizer, wanted)
    check_loads(optimizer.replicas, model)

    for name in names[:3]:
        optimizer.ready([name])
        with pytest.raises(ValueError, match=f"{name} is complete already"):
            optimizer.ready([name])
    optimizer.zero_grad()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for s in optimizer.states.values() for t in (s.master, s.exp_avg, s.exp_avg_sq)}
    shared = {b.weights.untyped_storage().data_ptr() for b in optimizer.buckets}
    nbytes = sum(n for where, n in storages.items() if where not in shared)
    places = {name: (optimizer.replicas.ranks(name), s.first, s.end, s.parameter.numel())
              for name, s in optimizer.states.items()}
    return [norm.hex() for norm in norms], nbytes, places, len(optimizer.buckets)


def every_layout(rank, size):
    wanted = sharded.tree(*sharded.single())
    wanted_bf16 = sharded.tree(*sharded.single(precision="bf16", moments="bf16"))
    results = {name: train(rank, size, layout, wanted) for name, layout in LAYOUTS[size].items()}
    for name, layout in list(LAYOUTS[size].items())[-1:]:
        train(rank, size, layout, wanted_bf16, precision="bf16", moments="bf16", bucket=1 << 20)
    check_totals(rank, size)
    return results


def check_totals(rank, size):
    mesh = Mesh(size, rank, pp=2, ep=size // 2)
    mesh.connect(TIMEOUT)
    # FAULTS A01 over data ranks: 1 valid token of loss 4 on one, 3 of loss 0 on the other -> 1.0, not the mean 2.0.
    if size == 4:
        counts = total_counts(mesh, torch.tensor([[1, 5], [3, 0]][mesh.data_rank]))
        assert counts.tolist() == [4, 5]  # of both data ranks, once, although two pipeline ranks count them
        losses = torch.tensor([4.0 if mesh.data_rank == 0 and mesh.pp_rank == 1 else 0.0], dtype=torch.float64)
        assert total_sums(mesh, losses).item() / counts[0].item() == 1.0
    # Bit-equal whatever the order: 2**53 + 1 + … differs between orders of summation.
    parts = torch.tensor([[2.0**53, 1.0, 1.0, -(2.0**53)][rank], 0.1 * rank], dtype=torch.float64)
    total = total_sums(mesh, parts)
    assert len(set(mesh.host_group.gather_objects(str([x.hex() for x in total.tolist()]), "bits"))) == 1


def check_loads(replicas, model):
    """Every layer's counts of all ranks that route it, exact beyond FP64, and known where the layer is not held."""
    mesh = replicas.mesh
    for layer, router in zip(model.moe_layers, model.routers):
        router.load.copy_(torch.arange(8) + 2**60 * (layer == 1 and mesh.rank == 0) + 10 * mesh.rank)
    total = total_loads(mesh, model, [1, 2, 3, 4])
    for row, layer in zip(total, [1, 2, 3, 4]):
        holders = replicas.ranks(f"model.layers.{layer}.mlp.gate.weight")
        for expert, count in enumerate(row.tolist()):
            assert count == expert * len(holders) + 10 * sum(holders) + 2**60 * (layer == 1 and 0 in holders)


@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_equals_the_single_process(size):
    results = spawn(every_layout, size)
    for name in LAYOUTS[size]:
        norms, nbytes, places, buckets = zip(*(result[name] for result in results))
        check_norms(norms)
        check_memory(nbytes, places)
        assert min(buckets) > 4  # or the order of many buckets was not tried


def check_norms(norms):
    """The same bits on all ranks, a NaN on all, and the norm of the sums of whole numbers to 1e-12."""
    assert all(of_rank == norms[0] for of_rank in norms)
    first, spoilt, *rest = map(float.fromhex, norms[0])
    assert math.isnan(spoilt)
    for update, norm in enumerate([first, *rest], start=1):
        assert abs(norm / sharded.true_norm(update) - 1) < 1e-12


def check_memory(nbytes, places):
    """Each element is updated by one rank of its group; a rank's bytes are its shares' alone.

    In FP64 the master is the weight: 16 bytes of moments an element, and at most ALIGN elements of padding a parameter
    and twice that a bucket, of which there are no more than parameters.
    """
    for rank, of_rank in enumerate(places):
        share = sum(numel / len(ranks) for ranks, _, _, numel in of_rank.values())
        room = sum(3 * ALIGN for _ in of_rank)
        assert share * 16 <= nbytes[rank] + room * 16 and nbytes[rank] <= (share + room) * 16
        for name, (ranks, _, _, numel) in of_rank.items():
            ranges = sorted(places[other][name][1:3] for other in ranks)
            covered = 0
            for first, end in ranges:
                if first != end:
                    assert first == covered, name
                    covered = end
            assert covered == numel, name


def one_rank_is_missing(rank, size):
    """Rank 1 does not reduce; rank 0 says what it waited for, and the group of host objects still works."""
    replicas = LAYOUTS[2]["ep 2"].replicas(size, rank)
    replicas.mesh.connect(TIMEOUT)
    replicas.connect(timedelta(seconds=1))
    model, optimizer = sharded.build(replicas)
    if rank == 0:
        with pytest.raises(CommunicationError) as error:
            optimizer.grad_norm()
        text = str(error.value)
        assert text.startswith("reduce-scatter of the gradients of ") and "over ranks 0, 1 failed: " in text
        assert optimizer.buckets[0].slots[0].name in text and "\n" not in text
    replicas.mesh.host_group.gather_objects(rank, "the end")


def test_a_reduction_that_times_out_names_the_bucket_and_its_ranks():
    spawn(one_rank_is_missing, 2)
