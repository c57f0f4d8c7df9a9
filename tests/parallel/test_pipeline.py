"""Pipeline ranks compute what one process computes: every schedule, on 2 and 4 ranks, with overlap and without.

One spawn of 4 ranks runs all cases. The right values are the single process's (`single_process`), which the oracle has
checked against the equations; ranks' gradients, losses and loads are added up by name, as a step's reductions do.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from pipelines import CONFIG, DEVICE, Rank, build, loss_weights, make_batches, results, single_process, together
from ranks import spawn

from dstrain.model.loss import LossSums
from dstrain.model.units import evaluate
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.parallel.group import CommunicationError
from dstrain.parallel.transfer import Channels, TransferError
from dstrain.precision.linear import Linear
from dstrain.precision.main_grad import attach_main_grads

SIZES = [(2, 4), (2, 6), (4, 8)]  # ranks, micro-batches
CASES = {}
for schedule in ("1f1b", "zb1p", "dualpipe", "dualpipev"):
    for ranks, micro_batches in SIZES:
        for overlap in (True, False) if schedule.startswith("dual") else (True,):
            key = f"{schedule}-{ranks}-{micro_batches}{'' if overlap else '-plain'}"
            CASES[key] = (schedule, ranks, micro_batches, "fp64", {"overlap": overlap})
    for precision in ("fp32", "bf16"):
        CASES[f"{schedule}-{precision}"] = (schedule, 2, 4, precision, {})
for overlap in (True, False):
    CASES[f"dualpipe-fp8{'' if overlap else '-plain'}"] = ("dualpipe", 2, 4, "fp8", {"overlap": overlap})
CASES["dualpipe-recompute"] = ("dualpipe", 4, 8, "fp64", {"recompute": True})
# FAULTS C14: any number that a schedule admits ends; the last micro-batch is smaller in every case.
for schedule, ranks, micro_batches in (("1f1b", 4, 1), ("zb1p", 4, 3), ("dualpipev", 2, 5)):
    CASES[f"{schedule}-{ranks}-{micro_batches}"] = (schedule, ranks, micro_batches, "fp64", {})
FP64 = [key for key, case in CASES.items() if case[3] == "fp64"]


def run_cases(rank, world):
    """-> by case this rank's results."""
    return {key: run_case(rank, world, *case) for key, case in CASES.items()}


def run_case(rank, world, schedule, ranks, micro_batches, precision, options):
    one = Rank(schedule, ranks, micro_batches, CONFIG, precision, rank, world, **options)
    batches = make_batches(CONFIG, micro_batches)
    one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=1)
    return results(one.model, one.sums) | {"alive": one.executor.most_alive, "bound": one.schedule.most_alive[one.rank]}


@pytest.fixture(scope="module")
def of_ranks():
    return spawn(run_cases, 4, timeout=300)


def right(key):
    _, _, micro_batches, precision, _ = CASES[key]
    return right_values(micro_batches, precision)


@functools.cache
def right_values(micro_batches, precision):
    return single_process(CONFIG, precision, make_batches(CONFIG, micro_batches))


def assert_equal(got, expected, loss=1e-12, grad=1e-9):
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=loss, atol=0)
    assert got["grads"].keys() == expected["grads"].keys()
    for name, tensor in expected["grads"].items():
        scale = tensor.abs().max()
        assert scale > 0, name
        assert (got["grads"][name] - tensor).abs().max() <= grad * scale, name


@pytest.mark.parametrize("key", FP64)
def test_losses_gradients_and_loads_equal_the_single_process(of_ranks, key):
    ranks, expected = CASES[key][1], right(key)
    for first in range(0, 4, ranks):  # two pipelines of 2 ranks do the same
        got = together([of_ranks[rank][key] for rank in range(first, first + ranks)])
        assert_equal(got, expected)
        assert {k: v.tolist() for k, v in got["loads"].items()} == {k: v.tolist() for k, v in expected["loads"].items()}


@pytest.mark.parametrize("key", [key for key in CASES if key.endswith("fp32")])
def test_fp32_differs_from_the_single_process_by_rounding(of_ranks, key):
    assert_equal(together([of_ranks[rank][key] for rank in range(2)]), right(key), loss=1e-6, grad=1e-4)


@pytest.mark.parametrize("key", [key for key in CASES if key.endswith(("bf16", "fp8"))])
def test_bf16_passes_through_every_schedule_and_fp8_through_dualpipe(of_ranks, key):
    """Micro-batches' gradients are added up in another order, in FP32: as a whole they are equal to its rounding."""
    got, expected = together([of_ranks[rank][key] for rank in range(2)]), right(key)
    torch.testing.assert_close(got["losses"], expected["losses"], rtol=1e-5, atol=0)
    flat = [torch.cat([one["grads"][name].flatten() for name in sorted(expected["grads"])]) for one in (got, expected)]
    assert (flat[0] - flat[1]).norm() < 1e-5 * flat[1].norm()


@pytest.mark.parametrize("key", [key for key in CASES if key.endswith("-plain")])
def test_overlap_changes_no_bit(of_ranks, key):
    for rank in range(4):
        with_overlap, without = of_ranks[rank][key.removesuffix("-plain")], of_ranks[rank][key]
        assert torch.equal(with_overlap["losses"], without["losses"])
        for name, grad in without["grads"].items():
            assert torch.equal(with_overlap["grads"][name], grad), name


@pytest.mark.parametrize("key", CASES)
def test_activations_alive_peak_at_the_schedules_bound(of_ranks, key):
    for rank in range(4):
        assert of_ranks[rank][key]["alive"] == of_ranks[rank][key]["bound"]


def between_steps(rank, world):
    """-> results of 4 micro-batches twice; then what evaluations and an outside Linear leave behind."""
    one = Rank("dualpipe", 2, 4, CONFIG, "fp64", rank, world)
    batches = make_batches(CONFIG, 8)
    weights = loss_weights(CONFIG, batches)
    one.executor.train(batches[:4], one.sums, weights, step=1)
    one.executor.train(batches[4:], one.sums, weights, step=1)
    trained = results(one.model, one.sums)

    evaluated = []
    for count in (1, 4, 7):
        sums = LossSums(CONFIG.num_nextn_predict_layers, DEVICE)
        one.executor.evaluate(batches[-count:], sums, step=1)
        evaluated.append(torch.cat([sums.depths, sums.balance.view(1)]))
    outside = Linear(3, 2, torch.float64)
    attach_main_grads(outside, torch.float64)
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    outside(x).sum().backward()
    after = results(one.model, one.sums)
    unchanged = all(torch.equal(after["grads"][name], grad) for name, grad in trained["grads"].items())
    unchanged &= all(torch.equal(after["loads"][layer], load) for layer, load in trained["loads"].items())
    for parameter in one.model.parameters():
        parameter.main_grad.zero_()
    for router in one.model.routers:
        router.load.zero_()
    one.sums = LossSums(CONFIG.num_nextn_predict_layers, DEVICE)
    one.executor.train(batches[:4], one.sums, weights, step=2)
    one.executor.train(batches[4:], one.sums, weights, step=2)
    again = results(one.model, one.sums)
    return trained, evaluated, unchanged, outside.weight.main_grad, again


def test_accumulation_over_two_lists_evaluation_between_steps_and_a_linear_outside():
    """FAULTS A12: 4 micro-batches on 2 ranks, accumulated over 2 lists, are the single process's 8.

    FAULTS A14: an evaluation of any number of micro-batches between steps, and a Linear outside the schedule, whose
    main_grad is Σ over rows of 1 · x = 0 + 3, 1 + 4, 2 + 5; gradients and loads stand still, the next step is the same.
    """
    of_ranks = spawn(between_steps, 2, timeout=120)
    batches = make_batches(CONFIG, 8)
    assert_equal(together([one[0] for one in of_ranks]), single_process(CONFIG, "fp64", batches))
    model = build(CONFIG, "fp64")
    for i, count in enumerate((1, 4, 7)):
        sums = LossSums(CONFIG.num_nextn_predict_layers, DEVICE)
        for batch in batches[-count:]:
            evaluate(model, batch, LocalDispatcher(), sums)
        expected = torch.cat([sums.depths, sums.balance.view(1)])
        torch.testing.assert_close(sum(one[1][i] for one in of_ranks), expected, rtol=1e-12, atol=0)
    for trained, _, unchanged, outside, again in of_ranks:
        assert unchanged
        assert outside.tolist() == [[3.0, 5.0, 7.0]] * 2
        assert torch.equal(again["losses"], trained["losses"])
        assert all(torch.equal(again["grads"][name], grad) for name, grad in trained["grads"].items())


def wait_for_nobody(rank, world):
    """Rank 1 comes too late, then is gone. -> what rank 0 says."""
    late, gone = (Rank("1f1b", 2, 4, CONFIG, "fp64", rank, world) for _ in range(2))
    late.executor.channels.timeout = 1.0  # only now: on a busy machine the channels may take longer to open
    batches = make_batches(CONFIG, 4)
    if rank == 1:
        dist.barrier()
        return None
    said = []
    for one, step in ((late, 7), (gone, 8)):
        with pytest.raises(CommunicationError) as error:
            one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step)
        said.append(str(error.value))
        if step == 7:
            dist.barrier()
    with pytest.raises(TransferError) as error:
        Channels({(0, 1)}, [[0, 1]], 2.0, DEVICE)
    return [*said, str(error.value)]


def test_a_rank_that_is_late_or_gone_is_named_with_the_step_and_the_action():
    late, gone, closed = spawn(wait_for_nobody, 2, timeout=50)[0]
    place = "pipeline rank 0, step {}, action 3 of 8 (B of micro-batch 0 on stage 0): grad of micro-batch 0 for stage 0"
    assert late.startswith(place.format(7) + " (rank 1 to 0): nothing within 1")
    assert gone.startswith("pipeline rank 0, step 8, action ")
    assert "(rank 1 to 0): cut off after" in gone or "cannot start" in gone
    assert closed.startswith("channel from pipeline rank 0 to 1 does not open (")


def test_a_wrong_number_of_stages_or_micro_batches_is_refused():
    one = Rank("1f1b", 1, 3, CONFIG, "fp64", 0, 1)
    batches = make_batches(CONFIG, 2)
    with pytest.raises(ValueError, match="2 micro-batches for a schedule of 3"):
        one.executor.train(batches, one.sums, loss_weights(CONFIG, batches), step=1)
    with pytest.raises(ValueError, match="2 stages of units for a schedule of 1"):
        type(one.executor)(one.schedule, 0, one.model, [[], []], LocalDispatcher(), None)
