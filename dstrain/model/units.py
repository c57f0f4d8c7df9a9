"""One micro-batch through the units of the model: what a pipeline stage runs, and the plain run of all of them.

The hidden state flows down the list of units and its gradient back up; tokens do not travel. Each head adds its
own loss, so backward starts from local losses and from the gradient of the state that was passed on.
"""

from dataclasses import dataclass

import torch

from dstrain.model.attention import AttentionContext
from dstrain.model.batch import MicroBatch
from dstrain.model.block import BlockPass, Dispatcher
from dstrain.model.graph import Graph
from dstrain.model.loss import LossSums, LossWeights, head_loss
from dstrain.model.model import Model
from dstrain.model.mtp import MTPModule
from dstrain.model.rope import Rotary


@dataclass
class Job:
    """One micro-batch's run: everything its units share."""

    model: Model
    batch: MicroBatch
    context: AttentionContext
    dispatcher: Dispatcher
    sums: LossSums
    weights: LossWeights | None  # None: forward only
    recompute: bool = False

    @property
    def train(self) -> bool:
        return self.weights is not None

    def block_pass(self, block) -> BlockPass:
        return BlockPass(block, self.context, self.dispatcher, train=self.train, recompute=self.recompute)


class EmbedPass:
    def __init__(self, job: Job):
        self.job, self.graph = job, Graph(job.train)

    def forward(self, hidden: None) -> torch.Tensor:
        (hidden,) = self.graph.run(lambda: (self.job.model.model.embed_tokens(self.job.batch.inputs(0)),))
        return hidden

    def backward(self, grad: torch.Tensor) -> None:
        self.graph.backward(grad)


class BlockUnitPass:
    """The four phases in order; a schedule that overlaps reaches into `phases` instead."""

    def __init__(self, job: Job, block):
        self.job, self.phases = job, job.block_pass(block)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.job.sums.balance += self.phases.attention(hidden)
        self.phases.dispatch()
        self.phases.experts()
        return self.phases.combine()

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        self.phases.combine_backward(grad)
        self.phases.experts_backward()
        self.phases.dispatch_backward()
        weight = torch.tensor(self.job.weights.balance, dtype=torch.promote_types(grad.dtype, torch.float32))
        return self.phases.attention_backward(weight.to(grad.device))


class HeadPass:
    """Norm, projection and cross-entropy at one depth; gives the normalised state."""

    def __init__(self, job: Job, depth: int):
        self.job, self.depth, self.graph = job, depth, Graph(job.train)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        state, loss_sum = self.graph.run(self._run, hidden)
        self.job.sums.depths[self.depth] += loss_sum
        return state

    def _run(self, hidden):
        model, batch = self.job.model, self.job.batch
        state = model.head_norm(self.depth)(hidden)
        coefficient = self.job.weights.depths[self.depth] if self.job.train else None
        targets = batch.targets(self.depth).flatten()
        return state, head_loss(state.flatten(0, 1), model.lm_head.weight, targets, coefficient)

    def backward(self, grad_state: torch.Tensor | None) -> torch.Tensor:
        one = torch.ones((), dtype=torch.float64, device=self.job.model.device)  # see head_loss
        (grad,) = self.graph.backward(grad_state, one)
        return grad


class MergePass:
    """The entry of MTP module k: [embedding ; state] projected."""

    def __init__(self, job: Job, module: MTPModule, depth: int):
        self.job, self.module, self.depth, self.graph = job, module, depth, Graph(job.train)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        (hidden,) = self.graph.run(self._run, state)
        return hidden

    def _run(self, state):
        embedded = self.job.model.model.embed_tokens(self.job.batch.inputs(self.depth))
        return (self.module.merge(embedded, state),)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        (grad_state,) = self.graph.backward(grad)
        return grad_state


def unit_passes(job: Job) -> list:
    """A fresh pass for every unit of the model, in order."""
    passes = [EmbedPass(job), *(BlockUnitPass(job, block) for block in job.model.blocks), HeadPass(job, 0)]
    for depth, module in enumerate(job.model.mtp_modules, start=1):
        passes += [MergePass(job, module, depth), BlockUnitPass(job, module), HeadPass(job, depth)]
    return passes


def start(
    model: Model,
    batch: MicroBatch,
    dispatcher: Dispatcher,
    sums: LossSums,
    weights: LossWeights | None,
    recompute: bool = False,
) -> Job:
    rotary = Rotary(model.config, batch.positions, model.dtype)
    return Job(model, batch, AttentionContext(rotary, batch.starts), dispatcher, sums, weights, recompute)


def forward_backward(
    model: Model,
    batch: MicroBatch,
    dispatcher: Dispatcher,
    sums: LossSums,
    weights: LossWeights,
    recompute: bool = False,
) -> None:
    """Add one micro-batch's losses to `sums` and its gradients to every parameter's `main_grad`."""
    passes = unit_passes(start(model, batch, dispatcher, sums, weights, recompute))
    hidden = None
    for unit in passes:
        hidden = unit.forward(hidden)
    grad = None
    while passes:
        grad = passes.pop().backward(grad)


def evaluate(model: Model, batch: MicroBatch, dispatcher: Dispatcher, sums: LossSums) -> None:
    """Add one micro-batch's losses to `sums`; keeps nothing and counts no expert load."""
    hidden = None
    for unit in unit_passes(start(model, batch, dispatcher, sums, weights=None)):
        hidden = unit.forward(hidden)
