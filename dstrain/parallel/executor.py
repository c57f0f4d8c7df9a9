"""Runs one rank's list of a pipeline schedule, whichever schedule it is."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dstrain.model.batch import MicroBatch
from dstrain.model.block import Dispatcher
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.passes import Job
from dstrain.model.unit import Unit
from dstrain.model.units import BackwardWay, Chunk, ForwardWay
from dstrain.parallel.group import CommunicationError
from dstrain.parallel.overlap import run_pair
from dstrain.parallel.place import here
from dstrain.parallel.schedules.actions import Action, Schedule, Work
from dstrain.parallel.schedules.messages import Message, Traffic, messages
from dstrain.parallel.transfer import Channels, Transfer
from dstrain.precision.main_grad import WeightGradQueue, deferred


class Executor:
    """One pipeline rank. Every rank of a pipeline calls the same methods with the same micro-batches.

    `most_alive`: the most chunks (a micro-batch on a stage) whose activations were held at once, in all runs so far.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        model: Model,
        stages: list[list[Unit]],
        dispatcher: Dispatcher,
        channels: Channels | None,
        *,
        overlap: bool = True,
        recompute: bool = False,
    ):
        """rank: in the pipeline. model: holds at least the units of this rank's stages. stages: units of all stages.

        channels: opened for `messages(schedule).order`; None on a single rank. overlap: run the two halves of a pair
        between each other; without it one after the other, with equal results to the bit.
        """
        if len(stages) != schedule.stages:
            raise ValueError(f"{len(stages)} stages of units for a schedule of {schedule.stages}")
        self.schedule, self.rank, self.model, self.stages = schedule, rank, model, stages
        self.dispatcher, self.channels, self.overlap, self.recompute = dispatcher, channels, overlap, recompute
        self.traffic, self.most_alive = messages(schedule), 0

    def train(
        self,
        batches: list[MicroBatch],
        sums: LossSums,
        weights: LossWeights,
        step: int,
        stage_done: Callable[[int], None] | None = None,
    ) -> None:
        """Add the losses of this rank's heads to `sums` and the gradients of its stages to every `main_grad`.

        step: named in errors. stage_done(stage) is called as soon as a stage has added its last gradient. Raises
        CommunicationError when another rank is late, has failed or is gone.
        """
        if len(batches) != self.schedule.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches for a schedule of {self.schedule.micro_batches}")
        self._run(self.schedule, self.traffic, batches, sums, weights, step, stage_done)

    def evaluate(self, batches: list[MicroBatch], sums: LossSums, step: int) -> None:
        """Add the losses of this rank's heads to `sums`. Any number of micro-batches, as many at a time as in training.

        Keeps nothing and counts no expert load.
        """
        count = self.schedule.micro_batches
        for first in range(0, len(batches), count):
            part = batches[first : first + count]
            schedule = forward_only(self.schedule, len(part))
            self._run(schedule, messages(schedule), part, sums, None, step)

    def _run(self, schedule, traffic, batches, sums, weights, step, stage_done=None) -> None:
        run = _Run(self, schedule, traffic, batches, sums, weights)
        actions = schedule.actions[self.rank]
        last = {action.backward.stage: place for place, action in enumerate(actions) if action.backward is not None}
        for position, action in enumerate(actions):
            with self._named(step, f"action {position + 1} of {len(actions)} ({action})"):
                run.post(position)
                run.post(position + 1)  # what comes next travels beside this action's computation
                run.do(action)
            if stage_done is not None and action.backward is not None and last[action.backward.stage] == position:
                stage_done(action.backward.stage)
        with self._named(step, "end of the list"):
            run.finish()

    @contextmanager
    def _named(self, step: int, place: str) -> Iterator[None]:
        """Errors say where they happened: those of communication in their line, others in a note."""
        where = f"pipeline rank {self.rank}, step {step}, {place}"
        here.at(step, place)
        try:
            yield
        except CommunicationError as error:
            raise CommunicationError(f"{where}: {error}") from error
        except Exception as error:
            error.add_note(f"in {where}")
            raise


class _Run:
    """One run of the list, and everything that is under way in it."""

    def __init__(self, executor: Executor, schedule: Schedule, traffic: Traffic, batches, sums, weights):
        self.executor, self.schedule, self.rank = executor, schedule, executor.rank
        self.batches, self.sums, self.weights = batches, sums, weights
        self.needs = traffic.needs[self.rank]
        self.transfer = Transfer(executor.channels, self.rank, traffic, self._empty)
        self.chunks: dict[Work, Chunk] = {}  # forward done, backward not
        self.handed: dict[tuple[str, Work], torch.Tensor] = {}  # from one stage of this rank to another
        self.queue = WeightGradQueue()
        self.owed: deque[Work] = deque()  # whose weight gradients are in the queue

    def _empty(self, message: Message) -> torch.Tensor:
        batch, model = self.batches[message.micro_batch], self.executor.model
        shape = (len(batch.tokens), batch.length, model.config.hidden_size)
        return torch.empty(shape, dtype=model.dtype, device=model.device)

    def post(self, position: int) -> None:
        for message in self.needs[position] if position < len(self.needs) else ():
            self.transfer.post(message)

    def do(self, action: Action) -> None:
        if action.kind == "F":
            self._forward(action.forward)
        elif action.kind == "B":
            self._backward(action.backward, action.split)
        elif action.kind == "FB":
            self._pair(action.forward, action.backward)
        else:
            self._weights(action.backward)

    def _forward(self, work: Work) -> None:
        self._give("state", work, self._chunk(work).forward(self._take("state", work)))

    def _backward(self, work: Work, split: bool) -> None:
        grad = self._take("grad", work)
        if split:
            self.owed.append(work)
            with deferred(self.queue):
                grad = self.chunks[work].backward(grad)
        else:
            grad = self.chunks[work].backward(grad)
        del self.chunks[work]
        self._give("grad", work, grad)

    def _pair(self, forward: Work, backward: Work) -> None:
        """The state leaves before the gradient: that is the channels' order, see `messages`."""
        if not self.executor.overlap:
            self._forward(forward)
            self._backward(backward, split=False)
            return
        way = ForwardWay(self._chunk(forward), self._take("state", forward))
        back = BackwardWay(self.chunks[backward], self._take("grad", backward), split=True)
        run_pair(way, back)
        grad = back.finish()  # first, the last combine of the way forward is still under way
        del self.chunks[backward]
        self._give("state", forward, way.finish())
        self._give("grad", backward, grad)

    def _weights(self, work: Work) -> None:
        owed = self.owed.popleft()
        if owed != work:
            raise AssertionError(f"the list wants the weight gradients of {work} where the queue has those of {owed}")
        self.queue.pop()

    def _chunk(self, work: Work) -> Chunk:
        own = self.executor
        batch = self.batches[work.micro_batch]
        job = Job(own.model, batch, own.dispatcher, self.sums, self.weights, own.recompute)
        chunk = Chunk(job, own.stages[work.stage])
        if job.train:
            self.chunks[work] = chunk
            own.most_alive = max(own.most_alive, len(self.chunks))
        return chunk

    def _take(self, kind: str, work: Work) -> torch.Tensor | None:
        """The hidden state from the stage before, or the gradient from the stage behind; None at the model's ends."""
        stage = work.stage + (-1 if kind == "state" else 1)
        if not 0 <= stage < self.schedule.stages:
            return None
        source = self.schedule.rank_of(stage, work.micro_batch)
        if source == self.rank:
            return self.handed.pop((kind, work))
        return self.transfer.receive(Message(source, self.rank, kind, work.stage, work.micro_batch))

    def _give(self, kind: str, work: Work, tensor: torch.Tensor | None) -> None:
        """Hand on what `work` has made: the hidden state to the stage behind, or the gradient to the stage before."""
        stage = work.stage + (1 if kind == "state" else -1)
        if not 0 <= stage < self.schedule.stages:
            return
        target = self.schedule.rank_of(stage, work.micro_batch)
        if target == self.rank:
            self.handed[kind, Work(stage, work.micro_batch)] = tensor
        else:
            self.transfer.send(Message(self.rank, target, kind, stage, work.micro_batch), tensor)

    def finish(self) -> None:
        self.transfer.finish()
        for what, left in (("backwards", self.chunks), ("weight gradients", self.queue), ("handovers", self.handed)):
            if left:
                raise AssertionError(f"the list is over, but {len(left)} {what} are left")


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """The forwards of a schedule's first micro-batches, each rank's in the order of its list."""
    actions = [
        [Action("F", a.forward) for a in of_rank if a.forward is not None and a.forward.micro_batch < micro_batches]
        for of_rank in schedule.actions
    ]
    return dataclasses.replace(schedule, micro_batches=micro_batches, actions=actions)
