"""Every configuration key as a dataclass field. The groups mirror the folders of `configs/`.

Names of the model's fields are those of Hugging Face's DeepseekV3 configuration.
"""

from dataclasses import dataclass, field


@dataclass
class YarnConfig:
    """YaRN (arXiv 2309.00071) on the decoupled RoPE key; present means on, whatever the length."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass
class ModelConfig:
    """Architecture of a DeepSeek-V3-style model."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # dense FFN
    moe_intermediate_size: int  # one expert
    num_hidden_layers: int
    first_k_dense_replace: int  # the first k layers are dense
    num_attention_heads: int
    q_lora_rank: int | None  # null: a plain q_proj
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    topk_method: str  # noaux_tc (bias, group score = two best) | group_limited_greedy (best) | greedy (no groups)
    scoring_func: str  # sigmoid | softmax
    norm_topk_prob: bool
    routed_scaling_factor: float
    rope_theta: float
    rope_scaling: YarnConfig | None
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    num_nextn_predict_layers: int = 0  # MTP depth
    mtp_depth_weights: list[float] | None = None  # null: uniform; sums to 1

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def has_routing_bias(self) -> bool:
        return self.topk_method == "noaux_tc"

    @property
    def depth_weights(self) -> list[float]:
        """w_k of the MTP loss, one per depth."""
        depth = self.num_nextn_predict_layers
        return list(self.mtp_depth_weights) if self.mtp_depth_weights else [1.0 / max(depth, 1)] * depth


@dataclass
class Segment:
    """A piece of a schedule over tokens: it ends at `until` with `value`, reached by `shape`."""

    until: float | str  # tokens, or a percentage of schedule.tokens such as "2%"
    value: float
    shape: str = "constant"  # constant | linear | cosine


@dataclass
class SourceConfig:
    """One source of a mixture: ready token files, and how much of the samples they are."""

    task: str  # what kind of text it is, such as math or code; shares are summed by it in the metrics
    share: float  # of the samples, in any unit: shares are divided by their sum
    train: str  # prefix of token files, whose ids are data.tokenizer's
    name: str | None = None  # in metrics, and what the order of its documents is drawn from; null: the task
    schedule: list[Segment] = field(default_factory=list)  # moves the share over tokens, from `share` on
    fim_rate: float | None = None  # null: data.fim_rate

    @property
    def label(self) -> str:
        return self.task if self.name is None else self.name


@dataclass
class DataConfig:
    """Where tokens come from, and how they are cut into samples."""

    sequence_length: int
    text: str | None = None  # a text file or a folder of text files; null: the standard library's sources
    pattern: str = "*"  # which files of a folder are text
    train: str | None = None  # prefix of ready token files (PREFIX.bin, PREFIX.idx) instead of text
    sources: list[SourceConfig] | None = None  # a mixture of ready token files instead of text or train
    heldout: str | None = None  # the same as train for evaluation
    tokenizer: str | None = None  # a tokenizer.json; null: a byte-level BPE trained on the text
    vocab_size: int = 4096  # of a tokenizer trained here
    cache: str = "data/cache"  # folder of the corpora built from text
    document_mask: bool = False  # attention and targets stay inside a document
    fim_rate: float = 0.0  # of the training documents, rearranged as prefix, suffix, middle; others in every epoch


@dataclass
class BatchRamp:
    """Linear growth of the global batch over tokens, from `start` to `batch.sequences`."""

    start: int  # sequences
    until: float  # tokens
    multiple: int = 1  # the batch moves in multiples of this


@dataclass
class BatchConfig:
    """Sizes of the global batch and of a micro-batch, in sequences."""

    sequences: int
    micro_sequences: int
    ramp: BatchRamp | None = None


@dataclass
class PrecisionConfig:
    name: str = "auto"  # auto | fp32 | bf16 | fp8 | fp64; auto is never fp8
    backend: str = "auto"  # of fp8: auto | emulated | triton | torch | transformer_engine | deepgemm
    scales: str = "power_of_two"  # of fp8: power_of_two (rounded up, as DeepSeek-V3.1) | fp32 (as DeepSeek-V3)


@dataclass
class ParallelConfig:
    """How ranks share the work: rank = (pipeline rank · edp + i) · ep + j, with edp = ranks / (pp · ep)."""

    pp: int = 1  # pipeline ranks
    ep: int = 1  # expert-parallel ranks
    schedule: str = "1f1b"  # 1f1b | zb1p | dualpipe | dualpipev
    overlap: bool = True  # dualpipe, dualpipev: interleave the phases of a forward and a backward chunk
    stages: list[int] | None = None  # units (embed, blocks, head, MTP modules) of each stage; null: balanced by cost
    ranks_per_node: int | None = None  # ranks joined by fast links; null: as the launcher says
    dispatch: str = "compute"  # what tokens travel to experts in: compute (the compute type) | fp8 (with precision=fp8)
    recompute: str = "none"  # none | block: keep a block's input only and run it again in backward
    timeout: float = 600.0  # seconds that a rank waits for another before the run ends with what it waited for


@dataclass
class OptimConfig:
    """AdamW, clipping, the loss coefficients that do not depend on tokens, and the guard."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    moments: str = "bf16"  # bf16 | fp32
    balance_alpha: float = 1e-4  # weight of the sequence-wise balance loss
    max_skipped_steps: int = 10  # that many non-finite steps in a row end the run


@dataclass
class ScheduleConfig:
    """Everything that is a function of the tokens consumed."""

    tokens: float  # the run's length
    learning_rate: list[Segment] = field(default_factory=list)  # starts from 0
    bias_speed: list[Segment] = field(default_factory=list)  # gamma
    mtp_weight: list[Segment] = field(default_factory=list)  # lambda


@dataclass
class EvalConfig:
    every: int = 100  # optimizer steps; 0: only at the end
    sequences: int = 64  # held-out sequences of a periodic evaluation
    at_end: bool = True  # the whole held-out set once, at the end


@dataclass
class CheckpointConfig:
    every: int = 100  # optimizer steps; 0: only at the end
    keep: int = 3  # newest complete checkpoints kept; at least 2 (one to fall back on)
    initial: str | None = None  # start a new run from the weights, architecture and tokenizer of this checkpoint


@dataclass
class GuardConfig:
    """What a spike of the loss leads to. Steps with a non-finite loss or gradient are always skipped."""

    spikes: str = "off"  # off | skip (the step) | rollback (to the newest checkpoint, skipping the data behind it)
    window: int = 64  # applied steps that a loss is compared with; before there are as many, nothing is a spike
    deviations: float = 8.0  # a spike is that many (robust) standard deviations above their median
    rollbacks: int = 3  # to one checkpoint; the next one ends the run


@dataclass
class EmaConfig:
    """An average of the weights in host memory, 4 bytes a parameter, which evaluate, generate and export can take."""

    decay: float | None = None  # what one update leaves of the average, such as 0.999; null: no average
    every: int = 1  # updates between two refreshes, each with decay to the power of this


@dataclass
class TelemetryConfig:
    log_every: int = 10  # steps between console lines; a terminal shows every step in its bar
    peak_tflops: float | None = None  # of the device, for MFU; null: known by name, else measured
    wandb: str = "auto"  # auto (online where wandb has a key, else disabled) | online | offline | disabled
    wandb_project: str | None = None  # null: WANDB_PROJECT, else dstrain
    wandb_entity: str | None = None  # user or team; null: WANDB_ENTITY, else the key's own
    wandb_group: str | None = None  # runs that belong together
    wandb_name: str | None = None  # null: run.name


@dataclass
class RunConfig:
    name: str = ""
    dir: str = "runs"
    seed: int = 1234
    steps: int | None = None  # stop after this many optimizer steps in all; null: the schedule's tokens
    device: str = "auto"  # auto | cpu | cuda
    threads: int | None = None  # CPU threads; null: one per core
    compile: bool = False  # fuse norms, SwiGLU and rotation with torch.compile: faster steps, a slow first one


@dataclass
class TrainConfig:
    """The whole configuration of `dstrain train`."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    telemetry: TelemetryConfig
    guard: GuardConfig = field(default_factory=GuardConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class GenerateConfig:
    """The whole configuration of `dstrain generate`."""

    checkpoint: str  # a run folder (its newest complete checkpoint) or one checkpoint folder
    prompt: str | None = None  # null: read from standard input
    max_tokens: int = 256
    temperature: float = 0.8  # 0: greedy
    top_p: float = 1.0
    top_k: int | None = None  # null: all
    seed: int = 0
    drafts: int = 0  # tokens that the MTP modules draft at a time, up to the model's MTP depth
    compile: bool = False  # fuse each block with torch.compile: two to three times as fast on a CPU, a slow first token
    echo: bool = False  # print the prompt before the continuation
    weights: str = "final"  # final | ema (the average, of a run with ema.decay)
    precision: str = "auto"  # auto | fp32 | bf16 | fp8 | fp64
    device: str = "auto"  # auto | cpu | cuda


@dataclass
class EvaluateConfig:
    """The whole configuration of `dstrain evaluate`."""

    checkpoint: str  # a run folder (its newest complete checkpoint) or one checkpoint folder
    data: str | None = None  # prefix of token files, or a text file; null: the run's held-out set
    weights: str = "final"  # final | ema (the average, of a run with ema.decay)
    sequences: int | None = None  # the first so many; null: all
    sequence_length: int | None = None  # null: the run's
    precision: str | None = None  # auto | fp32 | bf16 | fp8 | fp64; null: the run's
    device: str = "auto"  # auto | cpu | cuda
    output: str = "table"  # table | json


@dataclass
class ExportConfig:
    """The whole configuration of `dstrain export`."""

    checkpoint: str  # a run folder (its newest complete checkpoint) or one checkpoint folder
    out: str  # the Hugging Face folder to write; new or empty
    dtype: str = "bf16"  # bf16 | fp32 | fp8 (E4M3 with one scale per 128x128 block; embedding, head, gate, norms BF16)
    shard_size: str = "5GB"  # the largest size of a safetensors file: bytes, or a number with KB, MB, GB, KiB, MiB, GiB
    fp8_scales: str = "power_of_two"  # power_of_two (as DeepSeek-V3.1) | fp32 (as DeepSeek-V3)
    weights: str = "final"  # final | ema (the average, of a run with ema.decay)


@dataclass
class ImportConfig:
    """The whole configuration of `dstrain import`."""

    from_: str  # a Hugging Face folder of DeepSeek-V3, V2 or Moonlight weights, BF16 or FP8
    out: str  # the checkpoint folder to write; new or empty


@dataclass
class PrepareConfig:
    """The whole configuration of `dstrain prepare`."""

    from_: str  # a file, a folder of files, or the name of a data set on the Hugging Face Hub
    out: str  # the token files to write: OUT.bin, OUT.idx and the summary OUT.json
    tokenizer: str  # a tokenizer.json
    format: str = "auto"  # auto (by the files' names) | text | jsonl | parquet | hub
    pattern: str = "*"  # which files of a folder are meant
    column: str = "text"  # of jsonl, parquet and hub: what holds the text
    unit: str = "file"  # of text: what is a document: file | paragraph (between empty lines) | line
    subset: str | None = None  # of hub: the data set's configuration
    split: str = "train"  # of hub
    limit: int | None = None  # take the first so many documents only; null: all
    workers: int | None = None  # processes that encode; null: one per core
    shard_size: str = "64MB"  # text of one shard: what one worker holds, and what an interruption can lose


@dataclass
class ReportConfig:
    """The whole configuration of `dstrain report`."""

    run: str  # a run folder, or several between commas, which are laid over each other
    out: str | None = None  # the page; null: report.html in the run's folder, or for several here


@dataclass
class ClusterConfig:
    """The GPUs that a plan is for: what each of them computes, holds and sends. GB and TFLOPS are powers of ten."""

    name: str
    gpus: int
    gpus_per_node: int
    memory_gib: float  # of a GPU
    reserved_gib: float  # of it, what driver, libraries and their communicators take
    bf16_tflops: float  # dense peak, against which MFU is measured
    bf16_achieved: float  # share of it that large matrix products reach
    fp8_tflops: float | None  # dense peak; null: no FP8
    fp8_achieved: float  # share of it that large matrix products reach
    attention_achieved: float  # share of bf16_tflops that the attention core reaches
    memory_gbps: float  # GB/s to and from a GPU's memory, as achieved
    node_gbps: float  # GB/s that a GPU sends to others of its node, as achieved
    network_gbps: float  # GB/s that a GPU sends to other nodes, as achieved
    price_per_hour: float  # of a GPU


@dataclass
class PlanBatch(BatchConfig):
    """Sizes of the global batch and of a micro-batch, in sequences."""

    micro_batches: int | None = None  # of one pipeline, instead of batch.sequences and its ramp


@dataclass
class PlanConfig(TrainConfig):
    """The whole configuration of `dstrain plan`: that of a training run, and what it is planned for."""

    batch: PlanBatch
    cluster: ClusterConfig | None = None
    phases: str | None = None  # measured times: a file of configs/phases by its name, or a path; null: by FLOPs and bytes
    expert_load: float = 1.0  # rows of the busiest rank's experts over the mean
    output: str = "table"  # table | json
    show: bool = False  # draw the schedule: as text here, as a picture into a file
    out: str | None = None  # the picture's file, an .svg; null: with show, named after the schedule, in the current folder
    rehearse: bool = False  # build every distinct rank by the training code and step it once, on tensors without data
    search: bool = False  # rank the layouts that fit the cluster by tokens per second
