"""Where a rank stands in a run: its place in the mesh, the stages it runs, what it holds and who else does.

All of it follows from the configuration and the number of ranks, so every rank knows the place of every other, and a
run of any size can be laid out by one process.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch

from dstrain.config.errors import InputError
from dstrain.config.schema import BatchConfig, TrainConfig
from dstrain.model.block import Dispatcher
from dstrain.model.model import Model
from dstrain.model.share import Share
from dstrain.parallel.dispatch import LocalDispatcher, row_alignment
from dstrain.parallel.dispatch_all_to_all import AllToAllDispatcher
from dstrain.parallel.dispatch_nodes import NodeLimitedDispatcher
from dstrain.parallel.executor import Executor
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.partition import partition
from dstrain.parallel.payload import PAYLOADS
from dstrain.parallel.replicas import Replicas, holds
from dstrain.parallel.schedules.build import build_schedule, check_counts
from dstrain.parallel.schedules.messages import messages
from dstrain.parallel.transfer import Channels


class Layout:
    """One rank's place. `connect` makes the process groups; without it nothing communicates."""

    def __init__(self, config: TrainConfig, world_size: int = 1, rank: int = 0, local_size: int = 1):
        """local_size: ranks on one machine, where parallel.ranks_per_node does not say.

        Raises InputError where ranks, schedule, batches and model do not fit together.
        """
        parallel, model = config.parallel, config.model
        self.config, self.parallel = config, parallel
        self.mesh = Mesh(world_size, rank, parallel.pp, parallel.ep)
        check_batches(config.batch, parallel.schedule, self.mesh)
        self.partition = partition(
            model, parallel.schedule, parallel.pp, config.data.sequence_length, ep=parallel.ep, counts=parallel.stages
        )
        stages = self.partition.stages
        units = [[unit for stage in own for unit in stages[stage]] for own in self.partition.stages_on]
        shares = [Share.of_units(model, of_rank) for of_rank in units]
        self.replicas = Replicas(self.mesh, model, shares)
        self.ranks_per_node = parallel.ranks_per_node or local_size
        if parallel.ep > self.ranks_per_node and parallel.ep % self.ranks_per_node:
            raise InputError(
                f"parallel.ep={parallel.ep} on nodes of {self.ranks_per_node} ranks (parallel.ranks_per_node): must be at "
                f"most {self.ranks_per_node} or a multiple of it"
            )
        if parallel.dispatch == "fp8" and config.precision.name != "fp8":
            raise InputError(f"parallel.dispatch=fp8 with precision.name={config.precision.name}: needs precision=fp8")
        self.channels: Channels | None = None
        self._executors: dict[int, Executor] = {}

    @property
    def is_single(self) -> bool:
        return self.mesh.world_size == 1

    def connect(self, device: torch.device) -> None:
        """Make every process group and open the pipeline's channels; all ranks at once."""
        timeout = timedelta(seconds=self.parallel.timeout)
        self.mesh.connect(timeout)
        self.replicas.connect(timeout)
        if self.mesh.pp > 1:
            first = micro_batches(self.config.batch, self.mesh, first_batch(self.config.batch))
            pairs = set(messages(build_schedule(self.parallel.schedule, self.mesh.pp, first)).order)
            pipelines = [[pp_rank * self.mesh.dp + data_rank for pp_rank in range(self.mesh.pp)]
                         for data_rank in range(self.mesh.dp)]
            self.channels = Channels(pairs, pipelines, self.parallel.timeout, device)

    def executor(self, model: Model, dispatcher: Dispatcher, sequences: int) -> Executor:
        """What runs a global batch of `sequences`; one a size, for the ramp of a run."""
        count = micro_batches(self.config.batch, self.mesh, sequences)
        if count not in self._executors:
            self._executors[count] = Executor(
                build_schedule(self.parallel.schedule, self.mesh.pp, count), self.mesh.pp_rank, model,
                self.partition.stages, dispatcher, self.channels,
                overlap=self.parallel.overlap, recompute=self.parallel.recompute == "block",
            )
        return self._executors[count]

    def dispatcher(self, device: torch.device, dtype: torch.dtype) -> Dispatcher:
        """How tokens travel to experts: not at all, over one group, or node by node."""
        alignment = row_alignment(device, dtype)
        ep, payload = self.mesh.ep, PAYLOADS[self.parallel.dispatch]
        if ep == 1:
            return LocalDispatcher(alignment)
        group, per_node = self.mesh.ep_group.handle, self.ranks_per_node
        if ep <= per_node:
            return AllToAllDispatcher(group, per_node, payload, device, alignment)
        timeout = timedelta(seconds=self.parallel.timeout)
        return NodeLimitedDispatcher(group, per_node, payload, device, timeout, alignment)

    def users(self, names: Iterable[str]) -> dict[str, frozenset[int]]:
        """Parameter -> the stages of this rank that use it."""
        shares = {stage: Share.of_units(self.config.model, self.partition.stages[stage])
                  for stage in self.partition.stages_on[self.mesh.pp_rank]}
        return {name: frozenset(stage for stage, share in shares.items() if holds(share, name)) for name in names}

    def parameters(self) -> list[tuple[int, int]]:
        """Of every parameter of this rank: its elements, and how many ranks hold it."""
        with torch.device("meta"):
            model = Model(self.config.model, torch.bfloat16, self.replicas.share)
        return [(p.numel(), len(self.replicas.ranks(name))) for name, p in model.named_parameters()]

    def lines(self) -> list[str]:
        """The layout in words, for the start of a run of several ranks."""
        mesh, parallel = self.mesh, self.parallel
        if self.is_single:
            return []
        found = [f"{mesh.world_size} ranks: {mesh.pp} pipeline x {mesh.edp} expert-data x {mesh.ep} expert-parallel; "
                 f"{mesh.dp} data ranks"]
        if mesh.pp > 1:
            overlap = ", overlapped" if parallel.overlap and parallel.schedule.startswith("dualpipe") else ""
            found += [f"schedule {parallel.schedule}{overlap}", *self.partition.lines()]
        return found


def first_batch(batch: BatchConfig) -> int:
    """Sequences of the smallest global batch, the first of the run."""
    return batch.sequences if batch.ramp is None else batch.ramp.start


def micro_batches(batch: BatchConfig, mesh: Mesh, sequences: int) -> int:
    """Micro-batches of each pipeline in a global batch."""
    return sequences // (mesh.dp * batch.micro_sequences)


def check_batches(batch: BatchConfig, schedule: str, mesh: Mesh) -> None:
    """InputError unless every global batch of the run divides evenly and is long enough for the schedule.

    A ramp only visits its start plus multiples of its step, and the full batch; both kinds are checked.
    """
    check_counts(schedule, mesh.pp, 2 * mesh.pp)  # the ranks alone; the batches have their own lines
    unit = mesh.dp * batch.micro_sequences * (2 if schedule == "dualpipe" else 1)
    least = mesh.dp * batch.micro_sequences * (2 * mesh.pp if schedule.startswith("dualpipe") else 1)
    sizes = {"batch.sequences": batch.sequences}
    if batch.ramp is not None:
        sizes |= {"batch.ramp.start": batch.ramp.start, "batch.ramp.multiple": batch.ramp.multiple}
    what = f"{mesh.dp} data ranks x batch.micro_sequences={batch.micro_sequences}"
    what += f", an even number of micro-batches for {schedule}" if schedule == "dualpipe" else ""
    for key, size in sizes.items():
        if size % unit:
            near = max(size // unit, 1) * unit
            valid = f"{near} or {near + unit}" if near < size else f"{near}"
            raise InputError(f"{key}={size}: must be a multiple of {unit} ({what}); nearest valid: {valid}")
    for key in ("batch.ramp.start", "batch.sequences"):
        if key in sizes and sizes[key] < least:
            raise InputError(
                f"{key}={sizes[key]}: schedule {schedule} on parallel.pp={mesh.pp} needs at least {2 * mesh.pp} "
                f"micro-batches in every batch, {least} sequences ({what}); nearest valid: {least}"
            )
