"""How long the phases of a micro-batch take: by operations and bytes over the cluster's rates, or as measured.

A measured source multiplies the analytic time of each phase by what was measured over what the same formula gives for
the run that was measured. For the measured run itself the formula cancels; another layout or model is scaled by its
operations and bytes.
"""

from dataclasses import dataclass, field

from dstrain.model.unit import Unit
from dstrain.parallel.schedules.pair import ORDER, Operation, Phase, pair_order, simulate_pair
from dstrain.planner.job import Job
from dstrain.planner.traffic import dispatch_links, hidden_bytes, links_between
from dstrain.planner.work import Work, attention_work, embed_work, experts_work, head_work, merge_work

LINK_OF = {("dispatch", "F"): "dispatch", ("combine", "F"): "combine",
           ("combine", "B"): "combine_backward", ("dispatch", "B"): "dispatch_backward"}
Factors = dict[str, float]  # "attention F" -> measured over analytic


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block's ten phases, and of the forward that a recomputing backward runs first."""

    phases: dict[Phase, float]
    again: float = 0

    def sum(self, parts: str, communicates: bool | None = None) -> float:
        return sum(seconds for phase, seconds in self.phases.items()
                   if phase.part in parts and communicates in (None, phase.communicates))


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on a stage. extra: of what is no block (embedding, heads, entries of MTP modules)."""

    blocks: list[BlockTimes]
    extra: dict[str, float]  # F, B, W

    def alone(self, parts: str) -> float:
        """Of the forward F, the backward BW, the split backward B or the weight gradients W by themselves."""
        total = sum(block.sum(parts) for block in self.blocks) + sum(self.extra[part] for part in parts)
        return total + (sum(block.again for block in self.blocks) if "B" in parts else 0)

    def communication(self, parts: str) -> float:
        return sum(block.sum(parts, communicates=True) for block in self.blocks)


@dataclass(frozen=True)
class PairTimes:
    """An overlapped pair: seconds in all, of them in communication, and of that beside computation."""

    seconds: float
    communication: float
    hidden: float


@dataclass
class Times:
    """The phase times of a job."""

    job: Job
    factors: Factors = field(default_factory=dict)

    def __post_init__(self):
        self.links = dispatch_links(self.job)
        self.blocks = {is_moe: self._block(is_moe) for is_moe in (True, False)}

    def stage(self, units: list[Unit]) -> StageTimes:
        extra = dict.fromkeys("FBW", 0.0)
        works = {"embed": [("embed", embed_work)], "block": [], "head": [("head", head_work)],
                 "mtp": [("merge", merge_work), ("head", head_work)]}
        for unit in units:
            for name, work in works[unit.kind]:
                for part, one in work(self.job).items():
                    extra[part] += self.compute(f"{name} {part}", one)
        model = self.job.config.model
        layers = [layer for unit in units if (layer := unit.layer(model)) is not None]
        return StageTimes([self.blocks[layer >= model.first_k_dense_replace] for layer in layers], extra)

    def pair(self, forward: StageTimes, backward: StageTimes) -> PairTimes:
        """The executor's order (schedules/pair.py); what is no block runs before and behind."""
        blocks = {"F": forward.blocks, "B": backward.blocks[::-1], "W": backward.blocks[::-1]}

        def time_of(operation: Operation) -> float:
            return blocks[operation.phase.part][operation.place].phases[operation.phase]

        line = simulate_pair(pair_order(len(forward.blocks), len(backward.blocks)), time_of)
        serial = forward.extra["F"] + backward.extra["B"] + backward.extra["W"]
        serial += sum(block.again for block in backward.blocks)
        sent = line.busy(communication=True)
        return PairTimes(line.span + serial, sent, sent * line.hidden_fraction)

    def transfer(self) -> float:
        """Of a hidden state to the next pipeline rank."""
        job = self.job
        neighbours = tuple(range(0, job.layout.mesh.world_size, job.layout.mesh.dp))[:2]
        size, rate = hidden_bytes(job), job.cluster.network_gbps if job.is_slow(neighbours) else job.cluster.node_gbps
        return size / rate / 1e9 * self.factors.get("transfer", 1)

    def collective(self, name: str, ranks: tuple[int, ...], size: float) -> float:
        """Of a reduce-scatter ("reduce") or an all-gather ("gather") of `size` bytes over these ranks."""
        return links_between(self.job, ranks, size).seconds(self.job) * self.factors.get(name, 1)

    def optimizer(self, moved: float) -> float:
        """Of an update that moves so many bytes to and from memory."""
        return self.compute("optimizer", Work(moved=moved))

    def _block(self, is_moe: bool) -> BlockTimes:
        works = {"attention": attention_work(self.job, is_moe), "experts": experts_work(self.job, is_moe)}
        phases = {}
        for phase in ORDER:
            key = f"{phase.name} {phase.part}"
            if not phase.communicates:
                phases[phase] = self.compute(key, works[phase.name][phase.part])
            else:
                sent = self.links[LINK_OF[phase.name, phase.part]].seconds(self.job) if is_moe else 0
                phases[phase] = sent * self.factors.get(key, 1)
        again = 0.0
        if self.job.config.parallel.recompute == "block":
            again = sum(phases[Phase(name, "F")] for name in ("attention", "dispatch", "experts"))
        return BlockTimes(phases, again)

    def compute(self, key: str, work: Work) -> float:
        cluster = self.job.cluster
        wide = cluster.bf16_tflops * cluster.bf16_achieved * 1e12
        linear = cluster.fp8_tflops * cluster.fp8_achieved * 1e12 if self.job.formats.fp8 else wide
        seconds = work.linear / linear + work.wide / wide
        seconds += work.core / (cluster.bf16_tflops * cluster.attention_achieved * 1e12)
        seconds += work.moved / cluster.memory_gbps / 1e9
        return seconds * self.factors.get(key, 1)
