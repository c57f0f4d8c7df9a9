"""The plan of a run: parameters, memory, time, throughput and price of a configuration on a cluster."""

from dataclasses import dataclass, replace
from functools import cached_property

from dstrain.model.count import Counts, count_parameters, flops_per_token
from dstrain.parallel.schedules.actions import Schedule
from dstrain.parallel.schedules.build import build_schedule
from dstrain.parallel.schedules.simulate import Durations, bubble
from dstrain.planner.holdings import Held, holdings
from dstrain.planner.job import Job
from dstrain.planner.memory import GIB, Memory, buffers, memories, state_bytes
from dstrain.planner.step import Step, sent_bytes, step_time
from dstrain.planner.times import Times
from dstrain.train.schedule import batch_sequences


@dataclass(frozen=True)
class Plan:
    """Everything that is known of one layout, at the full batch. Seconds, bytes, GPU hours."""

    job: Job
    times: Times
    held: list[list[Held]]

    @classmethod
    def of(cls, job: Job, times: Times) -> "Plan":
        return cls(job, times, holdings(job))

    @cached_property
    def schedule(self) -> Schedule:
        count = self.job.micro_batches(self.job.config.batch.sequences)
        return build_schedule(self.job.config.parallel.schedule, self.job.layout.mesh.pp, count)

    @property
    def least_memory(self) -> float:
        """Bytes of the worst rank before any activation."""
        return max(sum(state_bytes(self.job, held)) for held in self.held) + buffers(self.job)

    @cached_property
    def memory(self) -> list[Memory]:
        """By pipeline rank."""
        return memories(self.job, self.held)

    @cached_property
    def step(self) -> Step:
        return step_time(self.job, self.times, self.schedule, self.held)

    @cached_property
    def estimate(self) -> float:
        """Seconds of a step by its slowest rank's pairs alone, and the published bubble: to choose what is priced."""
        layout, name, pp = self.job.layout, self.job.config.parallel.schedule, self.job.layout.mesh.pp
        stages = [self.times.stage(units) for units in layout.partition.stages]
        costs = []
        for own in layout.partition.stages_on:
            first, last = stages[own[0]], stages[own[-1]]
            alone = Durations(first.alone("F"), first.alone("BW"), first.alone("W"), first.alone("FBW"))
            if len(own) == 1 or not self.job.config.parallel.overlap:
                each = sum(stages[stage].alone("FBW") for stage in own)
            else:
                each = self.times.pair(first, last).seconds + self.times.pair(last, first).seconds
                alone = replace(alone, FB=each / 2)
            shared = 2 if name == "dualpipe" else 1  # each of its two stages sees half of the micro-batches
            count = self.job.micro_batches(self.job.config.batch.sequences)
            costs.append(each / shared * count + bubble(name, pp, alone))
        return max(costs)

    @property
    def worst(self) -> int:
        """The pipeline rank that needs most memory."""
        totals = [memory.total for memory in self.memory]
        return totals.index(max(totals))

    @property
    def over(self) -> float:
        """Bytes by which the worst rank exceeds a GPU; negative: what is left."""
        return self.memory[self.worst].total - self.job.cluster.memory_gib * GIB

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step.seconds / self.job.cluster.gpus

    @property
    def tokens_per_step(self) -> int:
        return self.job.config.batch.sequences * self.job.config.data.sequence_length

    @property
    def mfu(self) -> float:
        """Of the dense BF16 peak, whatever the precision; FLOPs as `flops_per_token` counts them."""
        flops = flops_per_token(self.job.config.model, self.job.config.data.sequence_length)
        return self.tokens_per_second_per_gpu * flops / (self.job.cluster.bf16_tflops * 1e12)

    @property
    def gpu_hours_per_trillion_tokens(self) -> float:
        return 1e12 / self.tokens_per_second_per_gpu / 3600

    def sent(self) -> dict[str, dict[str, float]]:
        return sent_bytes(self.job, self.times, self.schedule, self.held)

    def counts(self) -> Counts:
        return count_parameters(self.job.config.model)

    def step_seconds(self, sequences: int) -> float:
        """Of a global batch of another size, on the way up the ramp."""
        parallel = self.job.config.parallel
        schedule = build_schedule(parallel.schedule, self.job.layout.mesh.pp, self.job.micro_batches(sequences))
        return step_time(self.job, self.times, schedule, self.held).seconds


@dataclass(frozen=True)
class Run:
    """A whole run by its schedule's tokens. ramp: its part before the full batch."""

    tokens: float
    steps: int
    gpu_hours: float
    price: float
    ramp_tokens: float
    ramp_gpu_hours: float


def whole_run(plan: Plan) -> Run:
    """Every step of the run with the batch that the trainer would take."""
    config, cluster = plan.job.config, plan.job.cluster
    total, length, consumed = config.schedule.tokens, config.data.sequence_length, 0
    counts: dict[int, int] = {}
    while config.batch.ramp is not None and consumed < min(config.batch.ramp.until, total):
        sequences = batch_sequences(config.batch, consumed)
        counts[sequences] = counts.get(sequences, 0) + 1
        consumed += sequences * length
    seconds_of = _seconds_of(plan, counts)
    ramp_tokens, ramp_seconds = consumed, sum(n * seconds_of[size] for size, n in counts.items())
    steps = max(-(-(total - consumed) // plan.tokens_per_step), 0)
    seconds = ramp_seconds + steps * plan.step.seconds
    hours = cluster.gpus / 3600
    return Run(total, sum(counts.values()) + int(steps), seconds * hours, seconds * hours * cluster.price_per_hour,
               ramp_tokens, ramp_seconds * hours)


def _seconds_of(plan: Plan, counts: dict[int, int]) -> dict[int, float]:
    """Step time by batch size: a pipeline's time grows by the same for every micro-batch, so two sizes tell all."""
    if not counts:
        return {}
    first, last = min(counts), plan.job.config.batch.sequences
    begin, end = plan.step_seconds(first), plan.step.seconds
    slope = (end - begin) / (last - first) if last > first else 0.0
    return {size: begin + slope * (size - first) for size in counts}
