"""schedules/pair.py: the published order of an overlapped pair, and its time from the published medians."""

import re

import pytest

from dstrain.parallel.schedules.pair import ORDER, Operation, Phase, pair_order, simulate_pair, taken_by

# REFERENCE §4: the order in the trace, and the median milliseconds per layer (H800, 4096 tokens, EP64).
PUBLISHED = ("combine(B) · attn(F) · mlp(B) · dispatch(F) · dispatch(B) · mlp(W) · mlp(F) · attn(B) · attn(W) · "
             "combine(F)")
MEDIANS = {
    "attention(F)": 4.36, "attention(B)": 9.41, "attention(W)": 2.39,
    "experts(F)": 4.50, "experts(B)": 5.41, "experts(W)": 6.22,
    "dispatch(F)": 6.57, "combine(F)": 8.89, "dispatch(B)": 7.39, "combine(B)": 5.72,
}


def time_of(factor: float = 1.0):
    return lambda op: MEDIANS[str(op.phase)] * (factor if op.phase.communicates else 1)


def test_order_is_the_published_one():
    names = PUBLISHED.replace("attn", "attention").replace("mlp", "experts").split(" · ")
    assert [str(phase) for phase in ORDER] == names
    sent = set(re.findall(r"(?:dispatch|combine)\(.\)", PUBLISHED))
    assert {str(phase) for phase in ORDER if phase.communicates} == sent


@pytest.mark.parametrize(
    ("factor", "overlap", "milliseconds"), [(1, True, 130.5), (1, False, 243.4), (1.5, True, 171.4), (2, True, 228.6)]
)
def test_pair_of_four_layers_takes_the_time_that_the_medians_give(factor, overlap, milliseconds):
    """130.5: the computation, 129.16, and the wait of the first mlp(B) for its combine(B), 5.72 - 4.36. Not overlapped:
    everything in turn. With slower communication its stream never waits: 1.5 and 2 times 114.28."""
    line = simulate_pair(pair_order(4, 4), time_of(factor), overlap)
    assert line.span == pytest.approx(milliseconds, rel=5e-4)


def test_pair_takes_longer_where_each_layers_forward_comes_first():
    forward_first = sorted(ORDER, key=lambda phase: {"attention(F)": 0, "dispatch(F)": 1, "experts(F)": 2,
                                                     "combine(F)": 3}.get(str(phase), 4))
    assert simulate_pair(pair_order(4, 4, forward_first), time_of()).span == pytest.approx(218.6, rel=5e-4)


def test_busy_times_and_hidden_share_of_the_pair():
    """All that is exposed is the end of the first combine(B), 1.36 of 114.28 ms (the trace itself: 96.3 % hidden)."""
    line = simulate_pair(pair_order(4, 4), time_of())
    assert line.busy(True) == pytest.approx(4 * 28.57) and line.busy(False) == pytest.approx(4 * 32.29)
    assert line.hidden_fraction == pytest.approx(1 - 1.36 / 114.28)
    assert simulate_pair(pair_order(4, 4), time_of(), overlap=False).hidden_fraction == 0


def test_first_layer_by_hand():
    """Start times on the two streams, in order: see the medians."""
    line = simulate_pair(pair_order(1, 1), time_of())
    right = {
        "combine(B)": 0, "attention(F)": 0, "experts(B)": 5.72, "dispatch(F)": 5.72, "dispatch(B)": 12.29,
        "experts(W)": 11.13, "experts(F)": 17.35, "attention(B)": 21.85, "attention(W)": 31.26, "combine(F)": 21.85,
    }
    assert {str(op.phase): pytest.approx(start) for op, start in line.start.items()} == right


def test_longer_chunks_tail_runs_alone():
    names = [(str(op.phase), op.place) for op in pair_order(2, 1)]
    assert names[:10] == [(str(phase), 0) for phase in ORDER]
    assert names[10:] == [("attention(F)", 1), ("dispatch(F)", 1), ("experts(F)", 1), ("combine(F)", 1)]
    tail = [(str(op.phase), op.place) for op in pair_order(1, 2)][10:]
    assert tail == [("combine(B)", 1), ("experts(B)", 1), ("dispatch(B)", 1), ("experts(W)", 1), ("attention(B)", 1),
                    ("attention(W)", 1)]
    assert pair_order(0, 0) == []
    # a forward alone: nothing to hide behind
    alone = simulate_pair(pair_order(3, 0), time_of())
    assert alone.span == pytest.approx(3 * (4.36 + 6.57 + 4.50 + 8.89)) and alone.hidden_fraction == 0


def test_every_operation_is_issued_after_what_it_takes():
    for forward, backward in ((4, 4), (1, 3), (5, 2)):
        issued = pair_order(forward, backward)
        assert len(set(issued)) == len(issued) == 4 * forward + 6 * backward
        for i, operation in enumerate(issued):
            assert taken_by(operation) is None or taken_by(operation) in issued[:i]


def test_chain_of_what_operations_take():
    def taken(name, part, place=0):
        found = taken_by(Operation(Phase(name, part), place))
        return found and str(found)

    assert [taken(n, "F", 2) for n in ("attention", "dispatch", "experts", "combine")] == [
        "combine(F) of layer 1", "attention(F) of layer 2", "dispatch(F) of layer 2", "experts(F) of layer 2"]
    assert [taken(n, "B", 2) for n in ("combine", "experts", "dispatch", "attention")] == [
        "attention(B) of layer 1", "combine(B) of layer 2", "experts(B) of layer 2", "dispatch(B) of layer 2"]
    assert taken("attention", "F") is None and taken("combine", "B") is None
    assert taken("experts", "W") == "experts(B) of layer 0" and taken("attention", "W") == "attention(B) of layer 0"


def test_order_that_issues_too_early_is_refused():
    with pytest.raises(ValueError, match=r"experts\(F\) of layer 0 is issued before dispatch\(F\) of layer 0"):
        simulate_pair(pair_order(1, 1, sorted(ORDER, key=lambda phase: phase != Phase("experts", "F"))), time_of())
