"""One optimizer step: gradients over the micro-batches, global norm, guard, clip, AdamW, routing-bias update."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dstrain.config.schedule import Schedule
from dstrain.config.schema import TrainConfig
from dstrain.model.batch import MicroBatch
from dstrain.model.block import Dispatcher
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.parallel.executor import Executor
from dstrain.parallel.layout import Layout
from dstrain.parallel.place import here
from dstrain.parallel.totals import total_counts, total_loads, total_sums
from dstrain.train.bias import max_violation, update_bias
from dstrain.train.ema import Ema
from dstrain.train.guard import is_spike, remember
from dstrain.train.optimizer import AdamW
from dstrain.train.schedule import batch_sequences
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
    """Runs optimizer steps, all ranks together, and gives the metrics of each: every rank the same but for the times."""

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        optimizer: AdamW,
        dispatcher: Dispatcher,
        stream,
        layout: Layout | None = None,
        ema: Ema | None = None,
    ):
        """stream.batch(first, count) -> tokens and documents, int64 [count, L + 1 + D].

        layout: connected, what the model and the optimizer were built for; None: this process is alone. ema: started,
        takes in every update.
        """
        layout = Layout(config) if layout is None else layout
        self.config, self.model, self.optimizer, self.dispatcher, self.stream = (
            config, model, optimizer, dispatcher, stream
        )
        self.layout, self.mesh, self.ema = layout, layout.mesh, ema
        self.users = layout.users(optimizer.states)
        self.schedules = Schedules.of(config)
        layers = config.model.num_hidden_layers + config.model.num_nextn_predict_layers
        self.moe_layers = list(range(config.model.first_k_dense_replace, layers))

    def step(self, state: RunState) -> dict:
        """Consume the next global batch and advance `state`. -> the step's metrics, speed but for MFU included.

        A non-finite loss or gradient on any rank, or a spike (see `guard`), skips the update on all: samples and the
        step's number are consumed, weights, moments, biases and `tokens` stand still.
        """
        begin = time.perf_counter()
        here.forget_waits()
        here.at(state.step + 1, "reading its samples")
        config, depth = self.config, self.config.model.num_nextn_predict_layers
        learning_rate = self.schedules.learning_rate(state.tokens)
        bias_speed, mtp_weight = self.schedules.bias_speed(state.tokens), self.schedules.mtp_weight(state.tokens)
        sequences = batch_sequences(config.batch, state.tokens)

        batches = self.micro_batches(state.samples, sequences)
        counts = self.on_host(total_counts(self.mesh, torch.stack([batch.valid_counts() for batch in batches]).sum(0)))
        weights = LossWeights.of_batch(
            counts, sequences, mtp_weight, config.model.depth_weights, config.optim.balance_alpha
        )
        sums = LossSums(depth, self.model.device)
        self.executor_of(state).train(batches, sums, weights, state.step + 1, self.gradients_of_a_step())

        here.at(state.step + 1, "losses, norm and optimizer")
        *depths, balance = self.on_host(total_sums(self.mesh, torch.cat((sums.depths, sums.balance.view(1)))))
        losses = [total / count if count else 0.0 for total, count in zip(depths, counts)]
        balance /= sequences
        grad_norm = self.on_host(self.optimizer.grad_norm())
        loads = total_loads(self.mesh, self.model, self.moe_layers)
        finite = all(map(math.isfinite, [*losses, balance, grad_norm]))
        spike = finite and is_spike(losses[0], state.recent_losses, config.guard)
        state.step += 1
        state.samples += sequences
        if finite and not spike:
            state.tokens += sequences * config.data.sequence_length
            state.updates += 1
            state.skipped_in_a_row = 0
            remember(losses[0], state.recent_losses, config.guard)
            if self.ema is not None:
                self.ema.wait()
            self.optimizer.step(learning_rate, state.updates, min(1.0, config.optim.grad_clip / (grad_norm + 1e-6)))
            for layer, router in zip(self.model.moe_layers, self.model.routers):
                update_bias(router, loads[self.moe_layers.index(layer)], bias_speed)
            if self.ema is not None:
                self.ema.update(state.updates)
        else:
            state.skipped += 1
            state.skipped_in_a_row += 1
            self.optimizer.zero_grad()
        for router in self.model.routers:
            router.load.zero_()

        loss_mtp, loads = losses[1:], self.on_host(loads)
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
            "skipped": spike or not finite,
            **({} if config.guard.spikes == "off" else {"spike": spike}),
            **self.traffic(),
            **self.rank_times(seconds - here.waited()),
        }

    def on_host(self, values: torch.Tensor) -> list:
        """values -> as Python numbers, in lists for every dimension. The host waits for the device.

        Everything that a step reads is read here, and by the dispatcher: a rehearsal without data has its own numbers.
        """
        return values.tolist()

    def traffic(self) -> dict:
        """Bytes that all ranks sent for experts in this step; nothing where experts are not spread over ranks."""
        if self.mesh.ep == 1:
            return {}
        counted = self.dispatcher.traffic.metrics()
        self.dispatcher.traffic.reset()
        names = ["slow_bytes", "fast_bytes"]
        values = torch.tensor([counted[name] for name in names], dtype=torch.int64, device=self.model.device)
        total = self.on_host(self.mesh.world_group.total(values, "bytes of token dispatch"))
        return {f"dispatch_{name}": value for name, value in zip(names, total)}

    def rank_times(self, own: float) -> dict:
        """own: this rank's seconds of a step without those in which it waited for others.

        step_time_spread: how much longer the slowest rank's are than the median, as a fraction; slowest_rank: which it
        is. All ranks end a step together, so the step's own time does not tell. Nothing where there is one rank.
        """
        ranks = self.mesh.host_group
        if ranks.size == 1:
            return {}
        everyone = torch.zeros(ranks.size, dtype=torch.float64)
        ranks.own(everyone).fill_(own)
        ranks.all_gather(everyone, "step times").wait()
        times = everyone.tolist()
        slowest = max(range(len(times)), key=times.__getitem__)
        return {"step_time_spread": times[slowest] / statistics.median(times) - 1, "slowest_rank": slowest}

    def gradients_of_a_step(self) -> Callable[[int], None]:
        """What takes a stage that is done, and starts the reduction of every gradient that is complete by that."""
        missing = {name: set(stages) for name, stages in self.users.items()}

        def stage_done(stage: int) -> None:
            complete = [name for name, stages in missing.items() if stages == {stage}]
            for name in complete:
                del missing[name]
            for stages in missing.values():
                stages.discard(stage)
            self.optimizer.ready(complete)

        return stage_done

    def executor_of(self, state: RunState) -> Executor:
        """What runs the batch that comes next."""
        return self.layout.executor(self.model, self.dispatcher, batch_sequences(self.config.batch, state.tokens))

    def micro_batches(self, first: int, sequences: int) -> list[MicroBatch]:
        """This data rank's part of samples [first, first + sequences), in micro-batches of batch.micro_sequences."""
        depth, device = self.config.model.num_nextn_predict_layers, self.model.device
        part = sequences // self.mesh.dp
        tokens, documents = (x.to(device) for x in self.stream.batch(first + self.mesh.data_rank * part, part))
        size, mask = self.config.batch.micro_sequences, self.config.data.document_mask
        return [MicroBatch(t, d, depth, mask) for t, d in zip(tokens.split(size), documents.split(size))]
