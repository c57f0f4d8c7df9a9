"""What travels between ranks in a schedule: which messages an action needs, which it produces, and in what order.

A rank hands its messages to a channel (source, target) in the order of its own list, so that order is known to both
sides without a word. Works that follow each other on one rank hand over in memory: that is no message.
"""

from dataclasses import dataclass

from dstrain.parallel.schedules.actions import Action, Schedule, Work


@dataclass(frozen=True)
class Message:
    """state: the hidden state that `stage` takes. grad: the gradient of what `stage` gave, which its backward takes."""

    source: int
    target: int
    kind: str  # state | grad
    stage: int  # the stage that receives it
    micro_batch: int

    def __str__(self) -> str:
        way = f"rank {self.source} to {self.target}"
        return f"{self.kind} of micro-batch {self.micro_batch} for stage {self.stage} ({way})"


@dataclass(frozen=True)
class Traffic:
    needs: list[list[list[Message]]]  # [rank][position in its list] -> messages that must be there before
    produces: list[list[list[Message]]]  # the same -> messages that go out after, in this order
    order: dict[tuple[int, int], list[Message]]  # (source, target) -> all messages of the channel


def messages(schedule: Schedule) -> Traffic:
    """The traffic of a whole step.

    A pair sends its state before its gradient, often to the same rank. So the next rank needs its messages in the order
    in which they come, or, with more than 4 ranks of DualPipe or 2 of DualPipeV, keeps one of a channel aside: it takes
    a state before it runs that forward, while backwards go first. With gradients first that begins on 2 ranks.
    """
    needs = [[_needs(schedule, rank, action) for action in actions] for rank, actions in enumerate(schedule.actions)]
    produces = [[_produces(schedule, rank, action) for action in actions]
                for rank, actions in enumerate(schedule.actions)]
    order: dict[tuple[int, int], list[Message]] = {}
    for of_rank in produces:
        for of_action in of_rank:
            for message in of_action:
                order.setdefault((message.source, message.target), []).append(message)
    return Traffic(needs, produces, order)


def before(schedule: Schedule, action: Action) -> list[tuple[str, Work]]:
    """The works ("F" or "B") that must be done before an action, on whatever rank."""
    done = []
    if action.kind == "W":
        return [("B", action.backward)]
    if action.forward is not None and action.forward.stage > 0:
        done.append(("F", Work(action.forward.stage - 1, action.forward.micro_batch)))
    if action.backward is not None:
        done.append(("F", action.backward))
        if action.backward.stage < schedule.stages - 1:
            done.append(("B", Work(action.backward.stage + 1, action.backward.micro_batch)))
    return done


def _needs(schedule: Schedule, rank: int, action: Action) -> list[Message]:
    found = []
    work = action.forward
    if work is not None and work.stage > 0:
        source = schedule.rank_of(work.stage - 1, work.micro_batch)
        found.append(Message(source, rank, "state", work.stage, work.micro_batch))
    work = action.backward
    if work is not None and action.kind != "W" and work.stage < schedule.stages - 1:
        source = schedule.rank_of(work.stage + 1, work.micro_batch)
        found.append(Message(source, rank, "grad", work.stage, work.micro_batch))
    return [message for message in found if message.source != rank]


def _produces(schedule: Schedule, rank: int, action: Action) -> list[Message]:
    found = []
    work = action.forward
    if work is not None and work.stage < schedule.stages - 1:
        target = schedule.rank_of(work.stage + 1, work.micro_batch)
        found.append(Message(rank, target, "state", work.stage + 1, work.micro_batch))
    work = action.backward
    if work is not None and action.kind != "W" and work.stage > 0:
        target = schedule.rank_of(work.stage - 1, work.micro_batch)
        found.append(Message(rank, target, "grad", work.stage - 1, work.micro_batch))
    return [message for message in found if message.target != rank]
