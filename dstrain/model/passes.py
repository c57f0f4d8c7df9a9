"""The passes of one micro-batch through single units: embedding, block, head, and the entry of an MTP module.

Every pass but a block's runs at once: `forward` takes and gives the hidden state, `backward` its gradient. A block's is
in phases, see `block.py`.
"""

import torch

from dstrain.model.attention import AttentionContext
from dstrain.model.batch import MicroBatch
from dstrain.model.block import Block, BlockPass, Dispatcher
from dstrain.model.graph import Graph
from dstrain.model.loss import LossSums, LossWeights, head_loss, head_scores
from dstrain.model.model import Model
from dstrain.model.mtp import MTPModule
from dstrain.model.rope import Rotary
from dstrain.model.unit import Unit


class Job:
    """What all passes of one micro-batch share."""

    def __init__(
        self,
        model: Model,
        batch: MicroBatch,
        dispatcher: Dispatcher,
        sums: LossSums,
        weights: LossWeights | None,
        recompute: bool = False,
    ):
        """sums: the losses are added there. weights: None runs forward only, keeps nothing and counts no load."""
        self.model, self.batch, self.dispatcher = model, batch, dispatcher
        self.sums, self.weights, self.recompute = sums, weights, recompute
        self.context = AttentionContext(Rotary(model.config, batch.positions, model.dtype), batch.starts)

    @property
    def train(self) -> bool:
        return self.weights is not None

    def block_pass(self, block: Block) -> BlockPass:
        return BlockPass(block, self.context, self.dispatcher, train=self.train, recompute=self.recompute)


class EmbedPass:
    def __init__(self, job: Job):
        self.job, self.graph = job, Graph(job.train)

    def forward(self, hidden: None) -> torch.Tensor:
        (hidden,) = self.graph.run(lambda: (self.job.model.model.embed_tokens(self.job.batch.inputs(0)),))
        return hidden

    def backward(self, grad: torch.Tensor) -> None:
        self.graph.backward(grad)


class HeadPass:
    """Norm, projection and cross-entropy at one depth; gives the normalised state."""

    def __init__(self, job: Job, depth: int):
        self.job, self.depth, self.graph = job, depth, Graph(job.train)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        state, loss_sum, correct = self.graph.run(self._run, hidden)
        self.job.sums.depths[self.depth] += loss_sum
        if correct is not None:
            self.job.sums.correct[self.depth] += correct
        return state

    def _run(self, hidden):
        model, batch = self.job.model, self.job.batch
        state = model.head_norm(self.depth)(hidden)
        rows, targets, weight = state.flatten(0, 1), batch.targets(self.depth).flatten(), model.lm_head.weight
        if not self.job.train:
            return state, *head_scores(rows, weight, targets)
        return state, head_loss(rows, weight, targets, self.job.weights.depths[self.depth]), None

    def backward(self, grad_state: torch.Tensor | None) -> torch.Tensor:
        """grad_state: from the unit behind; None behind the last."""
        one = torch.ones((), dtype=torch.float64, device=self.job.model.device)  # see head_loss
        (grad,) = self.graph.backward(grad_state, one, None)
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


Pass = EmbedPass | BlockPass | HeadPass | MergePass


def unit_passes(job: Job, units: list[Unit]) -> list[Pass]:
    """Fresh passes for the units, in order."""
    model, passes = job.model, []
    for unit in units:
        if unit.kind == "embed":
            passes.append(EmbedPass(job))
        elif unit.kind == "block":
            passes.append(job.block_pass(model.layer(unit.index)))
        elif unit.kind == "head":
            passes.append(HeadPass(job, 0))
        else:
            module = model.mtp_module(unit.index)
            passes += [MergePass(job, module, unit.index), job.block_pass(module), HeadPass(job, unit.index)]
    return passes
