"""One micro-batch through the units of a stage, or of the whole model: a chunk.

The hidden state flows down the list of units and its gradient back up; tokens do not travel. Each head adds its
own loss, so backward starts from local losses and from the gradient of the state that was passed on.

A chunk's two ways are `ForwardWay` and `BackwardWay`. Per block they have a method for each phase; whatever is not a
block (embedding, head, the entry of an MTP module) runs on the way to the next one:

    forward     attention · dispatch · experts · combine, block by block, then finish -> hidden state
    backward    combine · experts · dispatch · attention, block by block from the last, then finish -> gradient
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dstrain.model.batch import MicroBatch
from dstrain.model.block import BlockPass, Dispatcher
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.passes import Job, unit_passes
from dstrain.model.unit import Unit, list_units
from dstrain.precision.main_grad import WeightGradQueue, deferred


class ForwardWay:
    """A chunk on its way forward. Phases must be called in order."""

    def __init__(self, chunk: "Chunk", hidden: torch.Tensor | None):
        """hidden [B, L, hidden]: from the stage before; None where the chunk embeds."""
        self.job, self.ahead, self.hidden = chunk.job, deque(chunk.passes), hidden
        self.blocks = chunk.blocks
        self.block: BlockPass | None = None
        if not chunk.job.train:
            chunk.passes = None  # nothing will come back

    def _go_on(self) -> None:
        """Wait for the block that was combined last and run everything before the next one."""
        if self.block is not None:
            self.hidden, self.block = self.block.output(), None
        while self.ahead and not isinstance(self.ahead[0], BlockPass):
            self.hidden = self.ahead.popleft().forward(self.hidden)

    def attention(self) -> None:
        self._go_on()
        self.block, hidden, self.hidden = self.ahead.popleft(), self.hidden, None
        self.job.sums.balance += self.block.attention(hidden)

    def dispatch_is_ready(self) -> bool:
        return self.block.dispatch_is_ready()

    def dispatch(self) -> None:
        self.block.dispatch()

    def experts(self) -> None:
        self.block.experts()

    def combine(self) -> None:
        self.block.combine()

    def finish(self) -> torch.Tensor:
        """-> what the last unit gives on, [B, L, hidden]."""
        self._go_on()
        return self.hidden


class BackwardWay:
    """A chunk on its way back. With `split` the weight gradients of a block's phases wait for `weights`."""

    def __init__(self, chunk: "Chunk", grad: torch.Tensor | None, split: bool = False):
        """grad [B, L, hidden]: from the stage behind; None behind the last unit."""
        self.job, self.ahead, self.grad = chunk.job, chunk.passes, grad
        self.blocks = chunk.blocks
        self.queue = WeightGradQueue() if split else None
        self.block: BlockPass | None = None
        weights = chunk.job.weights
        # The routers' loss is in at least FP32; made here, not copied there, so that a GPU's host does not wait.
        wide = torch.promote_types(chunk.job.model.dtype, torch.float32)
        self.balance = torch.full((), weights.balance, dtype=wide, device=chunk.job.model.device)

    def _go_on(self) -> None:
        while self.ahead and not isinstance(self.ahead[-1], BlockPass):
            self.grad = self.ahead.pop().backward(self.grad)

    @contextmanager
    def _weights_later(self) -> Iterator[None]:
        if self.queue is None:
            yield
        else:
            with deferred(self.queue):
                yield

    def combine(self) -> None:
        self._go_on()
        self.block, grad, self.grad = self.ahead.pop(), self.grad, None
        self.block.combine_backward(grad)

    def experts(self) -> None:
        with self._weights_later():
            self.block.experts_backward()

    def dispatch(self) -> None:
        self.block.dispatch_backward()

    def attention(self) -> None:
        with self._weights_later():
            self.grad = self.block.attention_backward(self.balance)
        self.block = None

    def weights(self) -> None:
        """The weight gradients of the phase before whose are oldest."""
        self.queue.pop()

    def finish(self) -> torch.Tensor | None:
        """-> the gradient of what the first unit took; None for the embedding."""
        self._go_on()
        return self.grad


class Chunk:
    """One micro-batch through consecutive units."""

    def __init__(self, job: Job, units: list[Unit]):
        self.job, self.passes = job, unit_passes(job, units)
        self.blocks = sum(isinstance(one, BlockPass) for one in self.passes)

    def forward(self, hidden: torch.Tensor | None) -> torch.Tensor:
        way = ForwardWay(self, hidden)
        for _ in range(way.blocks):
            way.attention()
            way.dispatch()
            way.experts()
            way.combine()
        return way.finish()

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Adds to every `main_grad`, or leaves the weight gradients in the chunk of a queue that is open."""
        way = BackwardWay(self, grad)
        for _ in range(way.blocks):
            way.combine()
            way.experts()
            way.dispatch()
            way.attention()
        return way.finish()


def forward_backward(
    model: Model,
    batch: MicroBatch,
    dispatcher: Dispatcher,
    sums: LossSums,
    weights: LossWeights,
    recompute: bool = False,
) -> None:
    """Add one micro-batch's losses to `sums` and its gradients to every parameter's `main_grad`."""
    chunk = Chunk(Job(model, batch, dispatcher, sums, weights, recompute), list_units(model.config))
    chunk.forward(None)
    chunk.backward(None)


def evaluate(model: Model, batch: MicroBatch, dispatcher: Dispatcher, sums: LossSums) -> None:
    """Add one micro-batch's losses to `sums`; keeps nothing and counts no expert load."""
    Chunk(Job(model, batch, dispatcher, sums, weights=None), list_units(model.config)).forward(None)
