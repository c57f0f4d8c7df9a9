"""One optimizer step: gradients over the micro-batches, global norm, guard, clip, AdamW, routing-bias update."""

import math
import time
from dataclasses import dataclass

import torch

from dstrain.config.schema import TrainConfig
from dstrain.model.batch import MicroBatch
from dstrain.model.block import Dispatcher
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.units import forward_backward
from dstrain.train.bias import max_violation, update_bias
from dstrain.train.optimizer import AdamW
from dstrain.train.schedule import Schedule, batch_sequences
from dstrain.train.state import RunState


@dataclass
class Schedules:
    """Functions of the tokens consumed before a step."""

    learning_rate: Schedule
    bias_speed: Schedule
    mtp_weight: Schedule

    @classmethod
    def of(cls, config: TrainConfig) -> "Schedules":
        tokens, schedule = config.schedule.tokens, config.schedule
        return cls(
            Schedule(schedule.learning_rate, tokens, start=0.0),
            Schedule(schedule.bias_speed, tokens),
            Schedule(schedule.mtp_weight, tokens),
        )


class Stepper:
    """Runs optimizer steps on one rank and gives the metrics of each."""

    def __init__(self, config: TrainConfig, model: Model, optimizer: AdamW, dispatcher: Dispatcher, stream):
        """stream.batch(first, count) -> tokens and documents, int64 [count, L + 1 + D]."""
        self.config, self.model, self.optimizer, self.dispatcher, self.stream = (
            config, model, optimizer, dispatcher, stream
        )
        self.schedules = Schedules.of(config)

    def step(self, state: RunState) -> dict:
        """Consume the next global batch and advance `state`. -> the step's metrics, speed but for MFU included.

        A non-finite loss or gradient skips the update: samples and the step's number are consumed, weights,
        moments, biases and `tokens` stand still.
        """
        begin = time.perf_counter()
        config, depth = self.config, self.config.model.num_nextn_predict_layers
        learning_rate = self.schedules.learning_rate(state.tokens)
        bias_speed, mtp_weight = self.schedules.bias_speed(state.tokens), self.schedules.mtp_weight(state.tokens)
        sequences = batch_sequences(config.batch, state.tokens)

        batches = self.micro_batches(state.samples, sequences)
        counts = torch.stack([batch.valid_counts() for batch in batches]).sum(0).tolist()
        weights = LossWeights.of_batch(
            counts, sequences, mtp_weight, config.model.depth_weights, config.optim.balance_alpha
        )
        sums = LossSums(depth, self.model.device)
        for batch in batches:
            forward_backward(
                self.model, batch, self.dispatcher, sums, weights, recompute=config.parallel.recompute == "block"
            )

        losses = [total / count if count else 0.0 for total, count in zip(sums.depths.tolist(), counts)]
        balance = sums.balance.item() / sequences
        grad_norm = self.optimizer.grad_norm().item()
        loads = [router.load.tolist() for router in self.model.routers]
        finite = all(map(math.isfinite, [*losses, balance, grad_norm]))
        state.step += 1
        state.samples += sequences
        if finite:
            state.tokens += sequences * config.data.sequence_length
            state.updates += 1
            state.skipped_in_a_row = 0
            self.optimizer.step(learning_rate, state.updates, min(1.0, config.optim.grad_clip / (grad_norm + 1e-6)))
            for router in self.model.routers:
                update_bias(router, bias_speed)
        else:
            state.skipped += 1
            state.skipped_in_a_row += 1
            self.optimizer.zero_grad()
        for router in self.model.routers:
            router.load.zero_()

        loss_mtp = losses[1:]
        mixed = sum(weight * loss for weight, loss in zip(config.model.depth_weights, loss_mtp)) if depth else 0.0
        seconds = time.perf_counter() - begin
        return {
            "step": state.step,
            "tokens": state.tokens,
            "samples": state.samples,
            "loss": losses[0] + mtp_weight * mixed + config.optim.balance_alpha * balance,
            "loss_main": losses[0],
            "loss_mtp": loss_mtp,
            "loss_balance": balance,
            "lr": learning_rate,
            "grad_norm": grad_norm,
            "step_time": seconds,
            "tokens_per_second": sequences * config.data.sequence_length / seconds,
            "moe_max_violation": max_violation(loads),
            "moe_load": loads,
            "bias_speed": bias_speed,
            "mtp_weight": mtp_weight,
            "batch_sequences": sequences,
            "skipped": not finite,
        }

    def micro_batches(self, first: int, sequences: int) -> list[MicroBatch]:
        """Samples [first, first + sequences) in micro-batches of batch.micro_sequences, on the model's device."""
        depth, device = self.config.model.num_nextn_predict_layers, self.model.device
        tokens, documents = (x.to(device) for x in self.stream.batch(first, sequences))
        size, mask = self.config.batch.micro_sequences, self.config.data.document_mask
        return [MicroBatch(t, d, depth, mask) for t, d in zip(tokens.split(size), documents.split(size))]
