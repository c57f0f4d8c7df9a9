"""schedules/check.py and messages.py: right lists pass, each kind of wrong list is named."""

import dataclasses

import pytest

from dstrain.parallel.schedules.actions import Action, Schedule, Work
from dstrain.parallel.schedules.build import NAMES, build_schedule
from dstrain.parallel.schedules.check import check
from dstrain.parallel.schedules.messages import Message, messages


@pytest.mark.parametrize(
    ("name", "ranks"), [(n, r) for n in NAMES for r in (1, 2, 3, 4, 5, 8, 16) if n != "dualpipe" or r % 2 == 0]
)
def test_every_schedule_passes(name, ranks):
    for micro_batches in (2 * ranks, 2 * ranks + 2, 3 * ranks + ranks % 2, 6 * ranks):
        found = check(build_schedule(name, ranks, micro_batches))
        # in the sender's order comes what the receiver needs next; with more than two ranks in a half one waits aside
        half = {"dualpipe": ranks // 2, "dualpipev": ranks}.get(name, 0)
        assert max(found.aside.values(), default=0) == (1 if half > 2 else 0)


def test_queue_of_weight_gradients():
    """DualPipe's table: step 8 pops the h+1 that step 6 has queued, step 7 keeps the queue's length."""
    assert check(build_schedule("dualpipe", 8, 16)).queued == [1, 2, 3, 4, 4, 3, 2, 1]
    assert check(build_schedule("zb1p", 4, 8)).queued == [1, 2, 3, 4]  # rank r lags r behind
    assert check(build_schedule("1f1b", 4, 8)).queued == [0] * 4


def test_messages_of_two_ranks_by_hand():
    """1F1B with two micro-batches: rank 0 F0 F1 B0 B1, rank 1 F0 B0 F1 B1."""
    traffic = messages(build_schedule("1f1b", 2, 2))
    states = [Message(0, 1, "state", 1, m) for m in range(2)]
    grads = [Message(1, 0, "grad", 0, m) for m in range(2)]
    assert traffic.order == {(0, 1): states, (1, 0): grads}
    assert traffic.produces == [[[states[0]], [states[1]], [], []], [[], [grads[0]], [], [grads[1]]]]
    assert traffic.needs == [[[], [], [grads[0]], [grads[1]]], [[states[0]], [], [states[1]], []]]


def test_pair_sends_its_state_then_its_gradient():
    schedule = build_schedule("dualpipe", 4, 8)
    traffic = messages(schedule)
    i = next(i for i, action in enumerate(schedule.actions[1]) if action.kind == "FB")
    kinds = [(message.kind, message.target) for message in traffic.produces[1][i]]
    assert len(kinds) == 2 and [kind for kind, _ in kinds] == ["state", "grad"] and len({t for _, t in kinds}) == 1


def test_turn_of_the_v_is_no_message():
    """DualPipeV's last rank hands stage R-1's state to stage R in memory, and the gradient back."""
    for channel, order in messages(build_schedule("dualpipev", 3, 6)).order.items():
        assert channel[0] != channel[1] and all((m.kind, m.stage) not in (("state", 3), ("grad", 2)) for m in order)
    assert messages(build_schedule("dualpipev", 1, 2)).order == {}


def test_weight_gradients_need_and_send_nothing():
    schedule = build_schedule("zb1p", 2, 3)
    traffic = messages(schedule)
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            if action.kind == "W":
                assert traffic.needs[rank][i] == traffic.produces[rank][i] == []


def changed(schedule: Schedule, rank: int, change) -> Schedule:
    actions = [list(listed) for listed in schedule.actions]
    change(actions[rank])
    return dataclasses.replace(schedule, actions=actions)


def swap(i: int, j: int):
    def change(actions):
        actions[i], actions[j] = actions[j], actions[i]

    return change


def put(i: int, action: Action):
    return lambda actions: actions.__setitem__(i, action)


# 1F1B, 2 ranks, 3 micro-batches: rank 0 F0 F1 B0 F2 B1 B2, rank 1 F0 B0 F1 B1 F2 B2.
# ZB1P: rank 0 F0 F1 B0 W0 F2 B1 W1 B2 W2, rank 1 F0 B0 F1 B1 W0 F2 B2 W1 W2.
@pytest.mark.parametrize(
    ("name", "rank", "change", "line"),
    [
        ("1f1b", 0, lambda a: a.pop(3), "no F of micro-batch 2 on stage 0"),
        ("1f1b", 1, lambda a: a.pop(), "no B of micro-batch 2 on stage 1"),
        ("1f1b", 0, lambda a: a.append(a[0]), "rank 0, action 6, F of micro-batch 0 on stage 0: F of micro-batch 0 on "
         "stage 0 a second time"),
        ("1f1b", 0, lambda a: a.append(a[2]), "B of micro-batch 0 on stage 0 a second time"),
        ("1f1b", 0, put(0, Action("F", forward=Work(1, 0))), "micro-batch 0 on stage 1 belongs to rank 1"),
        ("1f1b", 0, put(0, Action("F", forward=Work(0, 3))), "there is no micro-batch 3 on stage 0"),
        ("1f1b", 0, put(0, Action("F", backward=Work(0, 0))), "not an action"),
        ("1f1b", 0, put(0, Action("X", forward=Work(0, 0))), "not an action"),
        ("1f1b", 0, put(0, Action("F", forward=Work(0, 0), split=True)), "only a B can be split"),
        ("1f1b", 1, swap(0, 1), "deadlock"),  # its backward before its forward
        ("1f1b", 0, swap(1, 4), "deadlock, waiting for ever: rank 0 before B of micro-batch 1 on stage 0; rank 1 "
         "before F of micro-batch 1 on stage 1"),
        ("1f1b", 0, swap(2, 3), "rank 0 holds the activations of 3 micro-batches at once, stated: 2"),
        ("zb1p", 0, lambda a: a.pop(), "rank 0 ends with weight gradients in the queue, the oldest of micro-batch 2"),
        ("zb1p", 1, swap(4, 7), "the oldest in the queue is micro-batch 0 on stage 1"),
        ("zb1p", 0, swap(2, 3), "the oldest in the queue is nothing, it is empty"),
        ("zb1p", 0, put(2, Action("B", backward=Work(0, 0))), "the oldest in the queue is nothing"),
    ],
)
def test_each_fault_in_a_list_is_named(name, rank, change, line):
    schedule = build_schedule(name, 2, 3)
    check(schedule)
    with pytest.raises(ValueError) as caught:
        check(changed(schedule, rank, change))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_bound_that_is_never_reached_is_named():
    schedule = build_schedule("dualpipe", 2, 4)
    with pytest.raises(ValueError, match="rank 0 holds the activations of 3 micro-batches at once, stated: 4"):
        check(dataclasses.replace(schedule, most_alive=[4, 3]))


def test_messages_aside_are_counted():
    """1F1B whose last rank takes its micro-batches in the order 2, 1, 0: two states wait while it needs the third."""

    def forwards_first(stage, order):
        works = [Work(stage, micro_batch) for micro_batch in order]
        return [Action("F", forward=work) for work in works] + [Action("B", backward=work) for work in works]

    schedule = dataclasses.replace(
        build_schedule("1f1b", 2, 3), most_alive=[3, 3],
        actions=[forwards_first(0, [0, 1, 2]), forwards_first(1, [2, 1, 0])],
    )
    assert check(schedule).aside == {(0, 1): 2, (1, 0): 2}
