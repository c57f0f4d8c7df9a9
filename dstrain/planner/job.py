"""What a plan is about: a training configuration, its layout on a cluster, and the sizes of one micro-batch."""

from dataclasses import dataclass, replace

from dstrain.config.errors import InputError
from dstrain.config.schema import ClusterConfig, PlanConfig
from dstrain.parallel.layout import Layout

WIDE = {"fp32": 4, "bf16": 2, "fp8": 2, "fp64": 8}  # bytes of an element of the compute type


@dataclass(frozen=True)
class Formats:
    """Bytes of an element: of weights and activations, of gradients and masters, of the two moments together."""

    compute: int
    main: int
    moments: int
    fp8: bool

    @classmethod
    def of(cls, config: PlanConfig) -> "Formats":
        name = "bf16" if config.precision.name == "auto" else config.precision.name
        main = max(WIDE[name], 4)
        return cls(WIDE[name], main, 4 if config.optim.moments == "bf16" else 2 * main, name == "fp8")

    @property
    def wide(self) -> int:
        """Of what is at least FP32: norms, the gate, routing weights."""
        return max(self.compute, 4)

    @property
    def accumulated(self) -> int:
        """Bytes that move for every element of a weight gradient that is added to its accumulator.

        A product of narrower operands is written in the main type first.
        """
        return (2 if self.compute == self.main else 4) * self.main

    @property
    def tiles(self) -> float:
        """Of an activation as 1x128 E4M3 tiles with an FP32 scale each."""
        return 1 + 4 / 128


@dataclass(frozen=True)
class Job:
    """One layout of one run on one cluster. Every number of a plan follows from this."""

    config: PlanConfig
    cluster: ClusterConfig
    layout: Layout
    formats: Formats

    @classmethod
    def of(cls, config: PlanConfig) -> "Job":
        """Raises InputError where run, layout and cluster do not go together."""
        cluster = config.cluster
        if cluster is None:
            raise InputError("cluster has no value: give cluster=… (h800_2048, h100, h200, b200), "
                             "or batch.micro_batches=… for the schedule alone")
        if config.precision.name == "fp8" and cluster.fp8_tflops is None:
            raise InputError(f"precision=fp8: cluster {cluster.name} has no FP8 (cluster.fp8_tflops is null)")
        config = _with_batch(config, cluster)
        layout = Layout(config, cluster.gpus, 0, cluster.gpus_per_node)
        if config.batch.sequences < layout.mesh.dp * config.batch.micro_sequences:
            raise InputError(f"batch.sequences={config.batch.sequences}: the {layout.mesh.dp} data ranks need at least "
                             f"{layout.mesh.dp * config.batch.micro_sequences}")
        return cls(config, cluster, layout, Formats.of(config))

    @property
    def tokens(self) -> int:
        """Of one micro-batch."""
        return self.config.batch.micro_sequences * self.config.data.sequence_length

    @property
    def is_cuda(self) -> bool:
        """Whether the plan is for GPUs: it is unless run.device=cpu."""
        return self.config.run.device != "cpu"

    @property
    def rows(self) -> float:
        """Rows that a micro-batch brings to the experts of the busiest rank."""
        return self.tokens * self.config.model.num_experts_per_tok * self.config.expert_load

    def micro_batches(self, sequences: int) -> int:
        """Of each pipeline, in a global batch of `sequences`."""
        return sequences // (self.layout.mesh.dp * self.config.batch.micro_sequences)

    def is_slow(self, ranks: tuple[int, ...]) -> bool:
        """Whether these global ranks lie on several nodes."""
        return len({rank // self.cluster.gpus_per_node for rank in ranks}) > 1


def _with_batch(config: PlanConfig, cluster: ClusterConfig) -> PlanConfig:
    """batch.micro_batches, where it is given, as sequences."""
    count, parallel = config.batch.micro_batches, config.parallel
    if count is None or cluster.gpus % (parallel.pp * parallel.ep):
        return config
    sequences = count * config.batch.micro_sequences * (cluster.gpus // parallel.pp)
    return replace(config, batch=replace(config.batch, sequences=sequences, ramp=None))
