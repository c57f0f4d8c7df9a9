"""schedules/build.py and simulate.py: the lists equal REFERENCE §4's table, their idle time the published formulas."""

import pytest

from dstrain.config.errors import InputError
from dstrain.parallel.schedules.actions import Action, Schedule
from dstrain.parallel.schedules.build import NAMES, build_schedule, check_counts, stages_on
from dstrain.parallel.schedules.check import check
from dstrain.parallel.schedules.simulate import Durations, bubble, simulate

# REFERENCE §4, DualPipe: repetitions and operations of the eight steps; z: weight gradients queued.
TABLE = [
    ("2 * (H - h - 1)", "F0"),
    ("h + 1", "F0 F1"),
    ("H - h - 1", "B1z W F1"),
    ("MAIN", "F0&B1 F1&B0"),
    ("H - h - 1", "B1 F1&B0"),
    ("h + 1", "B1 B0"),
    ("H - h - 1", "W B0z"),
    ("h + 1", "W"),
]


def table_list(h: int, H: int, main: int) -> list[str]:
    """The table written out for one rank."""
    listed = []
    for step, (repeated, operations) in enumerate(TABLE, start=1):
        for i in range(eval(repeated, {"h": h, "H": H, "MAIN": main})):
            for operation in operations.split():
                if step == 4 and i == 0 and h == H - 1 and operation == "F0&B1":
                    listed += ["F0", "B1"]  # first pair not overlapped in the middle
                elif step == 6:
                    # zb from iteration (h+1)//2 on: from its B1 if h is odd, from its B0 if h is even
                    begins = ((h + 1) // 2, 0 if h % 2 else 1)
                    listed.append(operation + ("z" if (i, ["B1", "B0"].index(operation)) >= begins else ""))
                else:
                    listed.append(operation)
    return listed


def as_table(schedule: Schedule, rank: int) -> list[str]:
    """A rank's list in the table's words. Phase 0: the stream from the rank's own end, or the V's first arm."""

    def phase(work) -> int:
        if schedule.name == "dualpipev":
            return int(work.stage >= schedule.ranks)
        return int((work.micro_batch >= schedule.micro_batches // 2) != (rank >= schedule.ranks // 2))

    def word(action: Action) -> str:
        if action.kind == "W":
            return "W"
        parts = [f"F{phase(action.forward)}"] if action.forward else []
        parts += [f"B{phase(action.backward)}" + "z" * action.split] if action.backward else []
        return "&".join(parts)

    return [word(action) for action in schedule.actions[rank]]


def short(actions: list[Action]) -> str:
    return " ".join(action.kind + str((action.forward or action.backward).micro_batch) for action in actions)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 6, 40])
def test_dualpipe_equals_the_table(ranks, more):
    C, H = 2 * ranks + more, ranks // 2
    schedule = build_schedule("dualpipe", ranks, C)
    for rank in range(ranks):
        h = min(rank, ranks - 1 - rank)
        assert as_table(schedule, rank) == table_list(h, H, C // 2 - ranks + h + 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("more", [0, 1, 6, 21])
def test_dualpipev_equals_the_table(ranks, more):
    C = 2 * ranks + more
    schedule = build_schedule("dualpipev", ranks, C)
    for rank in range(ranks):
        assert as_table(schedule, rank) == table_list(rank, ranks, C - 2 * ranks + rank + 1)


@pytest.mark.parametrize(("ranks", "C"), [(2, 4), (4, 8), (4, 14), (8, 20), (16, 32)])
def test_numbers_of_operations_of_dualpipe_by_rank(ranks, C):
    """Sums over the table's rows: each of F and B occurs C times, alone or in a pair."""
    for rank, actions in enumerate(build_schedule("dualpipe", ranks, C).actions):
        h, H = min(rank, ranks - 1 - rank), ranks // 2
        middle = h == H - 1
        main = C // 2 - ranks + h + 1
        kinds = [action.kind for action in actions]
        assert kinds.count("F") == 2 * (H - h - 1) + 2 * (h + 1) + (H - h - 1) + middle
        assert kinds.count("B") == 2 * (H - h - 1) + 2 * (h + 1) + (H - h - 1) + middle
        assert kinds.count("FB") == 2 * main + (H - h - 1) - middle
        assert kinds.count("W") == 2 * (H - h - 1) + h + 1 == sum(action.split for action in actions)
        assert kinds.count("F") + kinds.count("FB") == kinds.count("B") + kinds.count("FB") == C


def test_dualpipe_streams_enter_at_both_ends():
    """Micro-batches 0 … C/2-1 start on rank 0, the others on rank R-1; stage s is on rank s or R-1-s."""
    schedule = build_schedule("dualpipe", 4, 8)
    assert [schedule.rank_of(s, 3) for s in range(4)] == [0, 1, 2, 3]
    assert [schedule.rank_of(s, 4) for s in range(4)] == [3, 2, 1, 0]
    assert short(schedule.actions[0][:4]) == "F0 F1 F2 F4" and short(schedule.actions[3][:4]) == "F4 F5 F6 F0"
    assert [schedule.stages_of(rank) for rank in range(4)] == [[0, 3], [1, 2], [1, 2], [0, 3]]


def test_dualpipev_turns_on_the_last_rank():
    schedule = build_schedule("dualpipev", 3, 6)
    assert schedule.stages == 6
    assert [schedule.rank_of(s, 5) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [schedule.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("name", NAMES)
def test_stages_of_a_rank_are_known_without_a_list(name):
    schedule = build_schedule(name, 6, 12)
    assert [stages_on(name, 6, rank) for rank in range(6)] == [schedule.stages_of(rank) for rank in range(6)]


def test_1f1b_lists_by_hand():
    """arXiv 2104.04473, figure 4's rule: R-1-r forwards, then one forward and one backward in turn, then backwards."""
    lists = [short(actions) for actions in build_schedule("1f1b", 3, 4).actions]
    assert lists == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    few = [short(actions) for actions in build_schedule("1f1b", 4, 2).actions]
    assert few == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert short(build_schedule("1f1b", 1, 3).actions[0]) == "F0 B0 F1 B1 F2 B2"
    assert not any(action.split for actions in build_schedule("1f1b", 3, 4).actions for action in actions)


def test_zb1p_lists_by_hand():
    """ZB-H1 (arXiv 2401.10241, §2.1): 1F1B's forwards and backwards; rank r is r weight gradients behind."""
    schedule = build_schedule("zb1p", 3, 4)
    assert [short(actions) for actions in schedule.actions] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]
    assert all(action.split == (action.kind == "B") for actions in schedule.actions for action in actions)


def idle(name: str, ranks: int, micro_batches: int) -> set[float]:
    return set(simulate(build_schedule(name, ranks, micro_batches)).idle())


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 10, 12, 14, 16])
def test_idle_time_of_dualpipe_is_the_formula_on_every_rank(ranks):
    """(R/2 - 1)(F&B + B - 3W) with F=1, B=2, W=1, F&B=3: 2 for each rank of a half but one."""
    for micro_batches in (2 * ranks, 2 * ranks + 2, 5 * ranks):
        assert idle("dualpipe", ranks, micro_batches) == {2 * (ranks // 2 - 1)}
    assert bubble("dualpipe", ranks) == 2 * (ranks // 2 - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_idle_time_of_dualpipev_is_the_formula_on_every_rank(ranks):
    """(PP/2 - 1)(F&B + B - 3W) where PP counts its 2R stages."""
    for micro_batches in (2 * ranks, 2 * ranks + 1, 5 * ranks):
        assert idle("dualpipev", ranks, micro_batches) == {2 * (2 * ranks // 2 - 1)}
    assert bubble("dualpipev", ranks) == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_idle_time_of_1f1b_and_zb1p_is_the_formula_on_every_rank(ranks):
    """(R-1)(F+B) and (R-1)(F+B-2W). ZB1P: from R micro-batches on; below, a missing one costs its weight gradient."""
    for micro_batches in (1, ranks, ranks + 1, 4 * ranks):
        assert idle("1f1b", ranks, micro_batches) == {3 * (ranks - 1)}
        assert idle("zb1p", ranks, micro_batches) == {ranks - 1 + max(0, ranks - micro_batches)}
    assert bubble("1f1b", ranks) == 3 * (ranks - 1) and bubble("zb1p", ranks) == ranks - 1


def test_formulas_with_other_durations():
    times = Durations(F=1.5, B=4, W=1.25, FB=5)
    assert bubble("1f1b", 8, times) == 7 * 5.5 and bubble("zb1p", 8, times) == 7 * 3
    assert bubble("dualpipe", 8, times) == 3 * 5.25 and bubble("dualpipev", 8, times) == 7 * 5.25


def test_times_of_a_small_schedule_by_hand():
    """1F1B, 2 ranks, 2 micro-batches, F=1, B=3, a transfer 0.5."""
    line = simulate(build_schedule("1f1b", 2, 2), Durations(F=1, B=3, transfer=0.5))
    assert line.start == [[0, 1, 6, 10], [1.5, 2.5, 5.5, 6.5]]  # F0 F1 B0 B1 and F0 B0 F1 B1
    assert line.end == [[1, 2, 9, 13], [2.5, 5.5, 6.5, 9.5]]
    assert line.makespan == 13 and line.idle() == [13 - 8, 13 - 8]


def test_transfers_between_a_rank_and_itself_are_free():
    """One rank of DualPipeV hands its states over in memory."""
    schedule = build_schedule("dualpipev", 1, 4)
    assert simulate(schedule, Durations(transfer=100)).makespan == simulate(schedule).makespan == 4 * 2 * 3


@pytest.mark.parametrize("name", NAMES)
def test_activations_alive_are_those_published(name):
    """REFERENCE §4: PP, PP, PP+1, PP+1 (DualPipeV: stages); rank r of 1F1B holds R-r. ZB-H1 keeps 1F1B's memory."""
    ranks = 8
    found = check(build_schedule(name, ranks, 2 * ranks + 2))
    right = {"dualpipe": [9] * 8, "dualpipev": [17] * 8}.get(name, [8, 7, 6, 5, 4, 3, 2, 1])
    assert found.alive == right
    if name == "zb1p":  # held until its weight gradient is done: within the first rank's 8 everywhere
        for actions in build_schedule(name, ranks, 18).actions:
            held = 0
            for action in actions:
                held += {"F": 1, "B": 0, "W": -1}[action.kind]
                assert held <= 8


# FAULTS C14: wrong numbers are refused with the rule and the nearest numbers that work
@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "words"),
    [
        ("dualpipe", 4, 1, "an even number of micro-batches, at least 8 (twice the ranks); nearest valid: 8"),
        ("dualpipe", 4, 3, "nearest valid: 8"),
        ("dualpipe", 4, 4, "4 micro-batches a step: schedule dualpipe on 4 ranks needs"),
        ("dualpipe", 4, 9, "nearest valid: 8 or 10"),
        ("dualpipe", 5, 10, "parallel.pp=5: schedule dualpipe needs an even number of ranks; nearest valid: 4 or 6"),
        ("dualpipe", 1, 10, "nearest valid: 2"),
        ("dualpipev", 4, 7, "at least 8 micro-batches (twice the ranks); nearest valid: 8"),
        ("dualpipev", 1, 1, "nearest valid: 2"),
        ("1f1b", 4, 0, "at least 1 micro-batch; nearest valid: 1"),
        ("zb1p", 0, 4, "parallel.pp=0: must be at least 1"),
        ("dualpip", 4, 8, "parallel.schedule=dualpip: unknown schedule (did you mean 'dualpipe'?)"),
        ("gpipe", 4, 8, "unknown schedule"),
    ],
)
def test_bad_counts_are_refused_with_the_nearest_valid(name, ranks, micro_batches, words):
    with pytest.raises(InputError) as caught:
        build_schedule(name, ranks, micro_batches)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InputError):
        check_counts(name, ranks, micro_batches)


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 5, 8])
def test_odd_and_few_micro_batches_are_legal_where_nothing_forbids_them(name, micro_batches):
    for ranks in (1, 2, 4):
        check(build_schedule(name, ranks, micro_batches))
