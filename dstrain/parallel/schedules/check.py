"""Proof that a schedule's lists are right, whoever made them: run them on paper and count."""

from dataclasses import dataclass

from dstrain.parallel.schedules.actions import Action, Schedule, Work
from dstrain.parallel.schedules.messages import Message, messages
from dstrain.parallel.schedules.simulate import simulate

FIELDS = {"F": (True, False), "B": (False, True), "FB": (True, True), "W": (False, True)}  # has forward, backward


@dataclass(frozen=True)
class Checked:
    """What a right schedule was found to hold, by rank."""

    alive: list[int]  # the most micro-batches, counted per stage, between forward and backward at one time
    queued: list[int]  # the most split backwards whose weight gradients are missing
    aside: dict[tuple[int, int], int]  # (source, target): the most messages received ahead of one needed earlier


def check(schedule: Schedule) -> Checked:
    """Raise ValueError with one line where a list is wrong; else what was counted.

    Proved: every micro-batch runs forward once and backward once per stage, on the rank that holds it; each rank's
    weight gradients are popped oldest first and all of them; all ranks come to their ends with sends that do not wait
    and receives in the sender's order; every message is sent once and used once; activations alive are at most
    `most_alive`, which is reached. A pair's forward counts as alive before its backward's is released.
    """
    where = f"schedule {schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches"
    alive, queued = [], []
    seen: dict[tuple[str, Work], int] = {}
    for rank, actions in enumerate(schedule.actions):
        most = _walk(schedule, rank, actions, seen, where)
        alive.append(most[0])
        queued.append(most[1])
    for kind in ("F", "B"):
        for stage in range(schedule.stages):
            for micro_batch in range(schedule.micro_batches):
                work = Work(stage, micro_batch)
                if (kind, work) not in seen:
                    raise ValueError(f"{where}: no {kind} of {work}")
    simulate(schedule)
    aside = _aside(schedule, where)
    for rank, (most, bound) in enumerate(zip(alive, schedule.most_alive, strict=True)):
        if most != bound:
            raise ValueError(f"{where}: rank {rank} holds the activations of {most} micro-batches at once, "
                             f"stated: {bound}")
    return Checked(alive, queued, aside)


def _walk(schedule: Schedule, rank: int, actions: list[Action], seen: dict, where: str) -> tuple[int, int]:
    """One rank's list from start to end -> the most activations alive and the longest queue."""
    alive, queue, most_alive, longest = 0, [], 0, 0
    for i, action in enumerate(actions):
        here = f"{where}: rank {rank}, action {i}, {action}"
        if FIELDS.get(action.kind) != (action.forward is not None, action.backward is not None):
            raise ValueError(f"{here}: not an action; F has a forward, B and W a backward, FB both")
        if action.split and action.kind != "B":
            raise ValueError(f"{here}: only a B can be split")
        if action.kind == "W":
            if not queue or queue[0] != action.backward:
                raise ValueError(f"{here}: the oldest in the queue is {queue[0] if queue else 'nothing, it is empty'}")
            queue.pop(0)
            continue
        for kind, work in (("F", action.forward), ("B", action.backward)):
            if work is None:
                continue
            if not (0 <= work.stage < schedule.stages and 0 <= work.micro_batch < schedule.micro_batches):
                raise ValueError(f"{here}: there is no {work}")
            if schedule.rank_of(work.stage, work.micro_batch) != rank:
                raise ValueError(f"{here}: {work} belongs to rank {schedule.rank_of(work.stage, work.micro_batch)}")
            if (kind, work) in seen:
                raise ValueError(f"{here}: {kind} of {work} a second time, the first was on rank {seen[kind, work]}")
            seen[kind, work] = rank
        alive += action.forward is not None
        most_alive = max(most_alive, alive)
        alive -= action.backward is not None
        if action.split:
            queue.append(action.backward)
            longest = max(longest, len(queue))
    if queue:
        raise ValueError(f"{where}: rank {rank} ends with weight gradients in the queue, the oldest of {queue[0]}")
    return most_alive, longest


def _aside(schedule: Schedule, where: str) -> dict[tuple[int, int], int]:
    """Receive every channel in its sender's order -> how many messages must wait aside for others, at most."""
    traffic = messages(schedule)
    coming = {channel: iter(order) for channel, order in traffic.order.items()}
    waiting: dict[tuple[int, int], set[Message]] = {channel: set() for channel in coming}
    most = dict.fromkeys(coming, 0)
    for of_rank in traffic.needs:
        for message in (message for of_action in of_rank for message in of_action):
            channel = message.source, message.target
            while message not in waiting.get(channel, ()):
                received = next(coming.get(channel, iter(())), None)
                if received is None:
                    raise ValueError(f"{where}: nobody sends the {message}")
                if received in waiting[channel]:
                    raise ValueError(f"{where}: sent twice: the {received}")
                waiting[channel].add(received)
            waiting[channel].remove(message)
            most[channel] = max(most[channel], len(waiting[channel]))
    for channel, left in waiting.items():
        for message in [*left, *coming[channel]]:
            raise ValueError(f"{where}: nobody takes the {message}")
    return most
