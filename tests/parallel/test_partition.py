"""partition.py: the best assignment of units to stages, against all of them; copies of embedding and head."""

import itertools
import random

import pytest
from oracle import tiny_config

from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.model.count import flops_per_token, unit_flops, unit_parameters
from dstrain.model.unit import Unit, list_units
from dstrain.parallel import partition as module
from dstrain.parallel.partition import partition


def counts(found) -> list[int]:
    return [len(stage) for stage in found.stages]


def rank_stages(schedule: str, ranks: int) -> list[tuple[int, ...]]:
    """DESIGN §4: DualPipe's rank runs stages r and R-1-r, DualPipeV's r and 2R-1-r, the others' their own."""
    last = {"dualpipe": ranks - 1, "dualpipev": 2 * ranks - 1}.get(schedule)
    return [(r,) if last is None else (r, last - r) for r in range(ranks)]


def brute_force(units, costs, sizes, table, schedule, ranks, most=None, tolerance=0.02):
    """All ways to cut the list -> the least largest rank cost, the least largest stage cost among those within the
    tolerance of it, the least sum of squares among these; None where no way keeps the limit."""
    own = rank_stages(schedule, ranks)
    stages = 1 + max(max(stages) for stages in own)
    ways = []
    for cuts in itertools.combinations(range(1, len(units)), stages - 1):
        ends = [0, *cuts, len(units)]
        pieces = [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        stage_costs = [sum(costs[i] for i in piece) for piece in pieces]
        largest = max(sum(stage_costs[s] for s in set(stages)) for stages in own)
        held = 0
        for stages in own:
            here = {i for s in stages for i in pieces[s]}
            kinds = {units[i].kind for i in here}
            held = max(held, sum(sizes[i] for i in here)
                       + table * ("mtp" in kinds and "embed" not in kinds)
                       + table * ("mtp" in kinds and "head" not in kinds))
        if most is None or held <= most:
            ways.append((largest, max(stage_costs), sum(cost**2 for cost in stage_costs), held))
    if not ways:
        return None
    least = min(way[0] for way in ways)
    close = [way[1:3] for way in ways if way[0] <= least * (1 + tolerance)]
    return least, *min(close)


@pytest.mark.parametrize(
    ("schedule", "ranks"), [("1f1b", 1), ("1f1b", 4), ("zb1p", 3), ("dualpipe", 2), ("dualpipe", 4), ("dualpipev", 2),
                            ("dualpipe", 6), ("dualpipev", 3)]
)
def test_best_of_all_ways(schedule, ranks, monkeypatch):
    """Random costs and sizes; every way to cut the list is tried, with and without a limit on parameters."""
    draw = random.Random(f"{schedule} {ranks}")
    config = tiny_config(num_hidden_layers=7, num_nextn_predict_layers=2)
    units, table = list_units(config), config.vocab_size * config.hidden_size
    tried = set()
    for trial in range(12):
        ranges = [(0, 9), (100, 104), (1, 400)]
        costs = {unit: draw.randint(*draw.choice(ranges)) for unit in units}
        sizes = {unit: draw.randint(1, 3 * table) for unit in units} | {Unit("embed"): table, Unit("head"): table + 24}
        monkeypatch.setattr(module, "unit_flops", lambda config, unit, length: costs[unit])
        monkeypatch.setattr(module, "unit_parameters", lambda config, ep: sizes)
        free = partition(config, schedule, ranks, 16)
        limits = [None, max(free.rank_parameters) - 1, int(0.8 * max(free.rank_parameters))]
        for most in limits:
            listed = ([values[unit] for unit in units] for values in (costs, sizes))
            right = brute_force(units, *listed, table, schedule, ranks, most)
            tried.add(right is None)
            if right is None:
                with pytest.raises(InputError, match="no partition keeps every rank within"):
                    partition(config, schedule, ranks, 16, most_parameters=most)
                continue
            found = partition(config, schedule, ranks, 16, most_parameters=most)
            assert [u for stage in found.stages for u in stage] == units and min(counts(found)) >= 1
            ranks_cost = max(sum(found.flops[s] for s in set(stages)) for stages in rank_stages(schedule, ranks))
            assert (max(found.flops), sum(cost**2 for cost in found.flops)) == right[1:]
            assert right[0] <= ranks_cost <= right[0] * 1.02
            assert most is None or max(found.rank_parameters) <= most
    assert False in tried and (True in tried or ranks == 1)


def test_least_limit_is_named_and_works():
    config = tiny_config(num_hidden_layers=6, num_nextn_predict_layers=1, mtp_depth_weights=None)
    with pytest.raises(InputError) as caught:
        partition(config, "dualpipe", 4, 16, most_parameters=1000)
    least = int(str(caught.value).rsplit(" ", 1)[1].replace(",", ""))
    assert max(partition(config, "dualpipe", 4, 16, most_parameters=least).rank_parameters) == least
    with pytest.raises(InputError):
        partition(config, "dualpipe", 4, 16, most_parameters=least - 1)


def test_costs_and_parameters_are_those_of_the_units():
    config = tiny_config(num_nextn_predict_layers=2)  # 3 blocks
    found = partition(config, "dualpipe", 2, 16, ep=2, counts=[3, 4])
    assert [[str(unit) for unit in stage] for stage in found.stages] == [
        ["embed", "block 0", "block 1"], ["block 2", "head", "mtp 1", "mtp 2"]]
    sizes = unit_parameters(config, 2)
    for s, stage in enumerate(found.stages):
        assert found.flops[s] == sum(unit_flops(config, unit, 16) for unit in stage)
        assert found.parameters[s] == sum(sizes[unit] for unit in stage)
    assert sum(found.flops) == flops_per_token(config, 16)
    assert found.rank_parameters == [sum(found.parameters)] * 2  # both ranks hold everything, in one copy


def test_copies_of_embedding_and_head():
    """An MTP unit needs both: here on a rank with neither, with the head alone, and with both."""
    config = tiny_config(num_nextn_predict_layers=2)  # embed, 3 blocks, head, 2 MTP units
    table = 61 * 24
    line = partition(config, "1f1b", 3, 16, counts=[3, 3, 1])  # … | block 2, head, mtp 1 | mtp 2
    assert (line.stages_with_embedding(), line.stages_with_head()) == ([0, 1, 2], [1, 2])
    own = line.parameters
    assert line.rank_parameters == [own[0], own[1] + table, own[2] + 2 * table]
    v = partition(config, "dualpipev", 2, 16, counts=[2, 2, 2, 1])  # rank 0: embed … and mtp 2; rank 1: head, mtp 1
    own = v.parameters
    assert v.rank_parameters == [own[0] + own[3] + table, own[1] + own[2] + table]
    assert v.ranks_of(v.stages_with_embedding()) == [0, 1]
    none = partition(tiny_config(num_nextn_predict_layers=0), "1f1b", 2, 16)
    assert none.stages_with_embedding() == [0] and none.stages_with_head() == [1]
    assert none.rank_parameters == none.parameters


def test_lines_say_where_everything_is():
    config = tiny_config(num_hidden_layers=6, num_nextn_predict_layers=1, mtp_depth_weights=None)
    found = partition(config, "dualpipe", 4, 16, counts=[4, 2, 2, 1])
    shares = [cost / flops_per_token(config, 16) for cost in found.flops]
    assert found.lines() == [
        f"stage 0 on ranks 0, 3: embed, blocks 0-2; {shares[0]:.1%} of the FLOPs, {found.parameters[0]:,} parameters",
        f"stage 1 on ranks 1, 2: blocks 3-4; {shares[1]:.1%} of the FLOPs, {found.parameters[1]:,} parameters",
        f"stage 2 on ranks 1, 2: block 5, head; {shares[2]:.1%} of the FLOPs, {found.parameters[2]:,} parameters",
        f"stage 3 on ranks 0, 3: mtp 1; {shares[3]:.1%} of the FLOPs, {found.parameters[3]:,} parameters",
        "embedding: used by stages 0, 3, one copy on ranks 0, 3, kept equal",
        "head: used by stages 2, 3, one copy on ranks 0, 1, 2, 3, kept equal",
    ]
    alone = partition(tiny_config(num_nextn_predict_layers=0), "1f1b", 2, 16, counts=[1, 4]).lines()
    assert alone[0].startswith("stage 0 on rank 0: embed;") and alone[-1] == "head: used by stage 1, one copy on rank 1"


def test_v3_on_16_ranks_is_balanced():
    """The published layout: 61 blocks over 16 stages. A block is a sixteenth's quarter, so no rank can be even."""
    config = compose("train", ["model=v3_671b"])[0].model
    found = partition(config, "dualpipe", 16, 4096, ep=64)
    assert counts(found)[1:-1] == [4] * 14 and sum(counts(found)) == 64
    assert found.stages_with_embedding() == [0, 15] and found.ranks_of([0]) == [0, 15]
    for schedule, ranks in (("dualpipe", 32), ("dualpipev", 16), ("1f1b", 32)):
        assert len(partition(config, schedule, ranks, 4096, ep=64).stages) == 32


def test_arms_of_a_rank_are_even_where_that_costs_little():
    """V3 on 4 ranks: the least rank cost alone pairs a stage of 31 units with one of 1."""
    config = compose("train", ["model=v3_671b"])[0].model
    assert counts(partition(config, "dualpipe", 4, 4096)) == [17, 16, 16, 15]


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("1f1b", 8, "parallel.pp=8: schedule 1f1b has 8 stages there, but model oracle has only 7 units (embedding, "
         "3 blocks, head, 2 MTP modules); valid: at most 7 ranks, or more layers"),
        ("dualpipe", 8, "valid: at most 6 ranks"),
        ("dualpipev", 4, "schedule dualpipev has 8 stages there, but model oracle has only 7 units (embedding, "
         "3 blocks, head, 2 MTP modules); valid: at most 3 ranks"),
    ],
)
def test_fewer_units_than_stages_are_refused(schedule, ranks, words):
    with pytest.raises(InputError) as caught:
        partition(tiny_config(name="oracle", num_nextn_predict_layers=2), schedule, ranks, 16)
    assert words in str(caught.value)


@pytest.mark.parametrize("given", [[3, 4, 0], [3, 3], [3, 5], [7], [-1, 8]])
def test_counts_that_do_not_fit_are_refused(given):
    with pytest.raises(InputError) as caught:
        partition(tiny_config(num_nextn_predict_layers=2), "dualpipe", 2, 16, counts=given)
    assert "needs 2 numbers of units, each at least 1, that sum to 7" in str(caught.value)


def test_given_counts_beyond_the_limit_are_refused():
    with pytest.raises(InputError, match=r"rank 1 holds [\d,]+ parameters, the limit is 5,000"):
        partition(tiny_config(num_nextn_predict_layers=0), "1f1b", 2, 16, counts=[1, 4], most_parameters=5000)
