"""Checks between keys, run once at the start: what would fail deep inside a run fails here in one line instead."""

import math
import re

from dstrain.config.errors import InputError
from dstrain.config.schema import (
    BatchConfig,
    ClusterConfig,
    DataConfig,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    PrepareConfig,
    ReportConfig,
    RunConfig,
    ScheduleConfig,
    Segment,
    SourceConfig,
    TelemetryConfig,
    TrainConfig,
    YarnConfig,
)

AnyConfig = (
    TrainConfig | GenerateConfig | EvaluateConfig | ExportConfig | ImportConfig | PlanConfig | PrepareConfig | ReportConfig
)
PRECISIONS = ("auto", "fp32", "bf16", "fp8", "fp64")
FP8_BACKENDS = ("auto", "emulated", "triton", "torch", "transformer_engine", "deepgemm")
FP8_SCALES = ("power_of_two", "fp32")
DEVICES = ("auto", "cpu", "cuda")
WEIGHTS = ("final", "ema")
SCHEDULES = ("1f1b", "zb1p", "dualpipe", "dualpipev")
SHAPES = ("constant", "linear", "cosine")
LARGEST_SEED = 2**64 - 1  # of torch's generators
MOST_THREADS = 4096  # more than any machine has; torch crashes at what it cannot start
LARGEST_SIZE = 2**20  # of a width; with LARGEST_COUNT of them the bytes of a matrix still fit into 64 bits
LARGEST_COUNT = 2**16  # of heads and experts
MOST_LAYERS = 4096
LARGEST_BATCH = 2**20  # sequences, whose tokens of one step lie in memory
LARGEST_PLAN = 2**16  # ranks times micro-batches of a schedule that is drawn
LARGEST_CLUSTER = 2**20  # GPUs
NAME_BYTES = 200  # a file system's 255, less what is put before or after the name


def validate(config: AnyConfig) -> AnyConfig:
    """The configuration itself, if it can run; else InputError naming the keys, their values and what is valid."""
    if isinstance(config, GenerateConfig):
        _generate(config)
        return config
    if isinstance(config, EvaluateConfig):
        _evaluate(config)
        return config
    if isinstance(config, ExportConfig):
        _export(config)
        return config
    if isinstance(config, ImportConfig):
        _given("from", config.from_, "a Hugging Face folder")
        _given("out", config.out, "the checkpoint folder to write")
        return config
    if isinstance(config, PlanConfig):
        _plan(config)
    if isinstance(config, PrepareConfig):
        _prepare(config)
        return config
    if isinstance(config, ReportConfig):
        _given("run", config.run, "a run folder, as in run=runs/tiny, or several as in run=runs/a,runs/b")
        if config.out is not None:
            _given("out", config.out, "null or the page to write, as in out=report.html")
        return config
    _run(config.run)
    _model(config.model)
    _data(config.data, config.model, config.schedule.tokens, trains_tokenizer=config.checkpoint.initial is None)
    _batch(config.batch)
    _precision(config.precision)
    _parallel(config.parallel, config.model)
    _optim(config.optim)
    _schedule(config.schedule)
    _at_least("eval.every", config.eval.every, 0)
    _at_least("eval.sequences", config.eval.sequences, 1)
    _at_least("checkpoint.every", config.checkpoint.every, 0)
    _at_least("checkpoint.keep", config.checkpoint.keep, 2)
    if config.checkpoint.initial is not None:
        _given("checkpoint.initial", config.checkpoint.initial, "null, a run folder or a checkpoint folder")
    _one_of("guard.spikes", config.guard.spikes, ("off", "skip", "rollback"))
    _at_least("guard.window", config.guard.window, 2)
    _positive("guard.deviations", config.guard.deviations)
    _at_least("guard.rollbacks", config.guard.rollbacks, 1)
    if config.ema.decay is not None and not 0 < config.ema.decay < 1:
        raise InputError(f"ema.decay={config.ema.decay}: must be null (no average) or above 0 and below 1")
    _at_least("ema.every", config.ema.every, 1)
    _telemetry(config.telemetry)
    return config


def _telemetry(telemetry: TelemetryConfig) -> None:
    _at_least("telemetry.log_every", telemetry.log_every, 1)
    if telemetry.peak_tflops is not None:
        _positive("telemetry.peak_tflops", telemetry.peak_tflops)
    _one_of("telemetry.wandb", telemetry.wandb, ("auto", "online", "offline", "disabled"))
    for key, most in (("project", 128), ("entity", 128), ("group", 128), ("name", 1024)):
        value, bad = getattr(telemetry, f"wandb_{key}"), r"[/\\#?%:]" if key == "project" else r"\0"
        if value is not None and (not 0 < len(value.strip()) <= most or re.search(bad, value)):
            raise InputError(f"telemetry.wandb_{key}={value!r}: must be null or text of at most {most} characters"
                             + (", none of them one of /\\#?%:" if key == "project" else ""))


def _precision(precision: PrecisionConfig) -> None:
    _one_of("precision.name", precision.name, PRECISIONS)
    _one_of("precision.backend", precision.backend, FP8_BACKENDS)
    _one_of("precision.scales", precision.scales, FP8_SCALES)
    if precision.name != "fp8" and (precision.backend, precision.scales) != ("auto", "power_of_two"):
        raise InputError(
            f"precision.backend={precision.backend} and precision.scales={precision.scales} need precision.name=fp8, "
            f"not {precision.name}"
        )


def resolve_until(until: float | str, tokens: float) -> float:
    """The end of a schedule's segment in tokens: a number as it is, "2%" of `tokens`.

    Raises InputError for text that is no percentage above 0 and up to 100.
    """
    if isinstance(until, int | float):
        return float(until)
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", until)
    if not found or not 0 < float(found[1]) <= 100:
        raise InputError(f"until: {until!r} is neither a number of tokens nor a percentage from above 0% to 100%")
    return float(found[1]) * tokens / 100


def parse_size(key: str, text: str) -> int:
    """Bytes of a size such as 5GB (10^9 bytes), 512MiB (2^20 bytes) or 1000000."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B|B)?\s*", text)
    size = 0
    if found:
        exponent = " KMGT".index(found[2] or " ")
        size = int(float(found[1]) * (1024 if found[3] else 1000) ** exponent)
    if size < 1:
        raise InputError(f"{key}={text}: must be a size in bytes such as 5GB, 512MiB or 1000000")
    return size


def check_run_name(name: str) -> None:
    """A run's name is one folder's name."""
    bad = not name.strip() or name in (".", "..") or re.search(r"[/\\\x00-\x1f\x7f]", name)
    if bad or len(name.encode("utf-8")) > NAME_BYTES:
        raise InputError(f"run.name: {name!r} cannot name a folder; valid: text without / and \\ and control "
                         f"characters, not empty, not . or .., at most {NAME_BYTES} bytes")


def _run(run: RunConfig) -> None:
    check_run_name(run.name)
    if not run.dir or "\0" in run.dir:
        raise InputError(f"run.dir: {run.dir!r} is not a folder; valid: a path, as in run.dir=runs")
    _from_to("run.seed", run.seed, 0, LARGEST_SEED)
    if run.steps is not None:
        _at_least("run.steps", run.steps, 1, "null (the schedule's tokens) or at least 1")
    _one_of("run.device", run.device, DEVICES)
    if run.threads is not None:
        _from_to("run.threads", run.threads, 1, MOST_THREADS, "null (one per core) or ")


def _model(model: ModelConfig) -> None:
    for key in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank",
                "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        _from_to(f"model.{key}", getattr(model, key), 1, LARGEST_SIZE)
    for key in ("num_attention_heads", "n_routed_experts", "n_shared_experts"):
        _from_to(f"model.{key}", getattr(model, key), 1, LARGEST_COUNT)
    for key in ("num_experts_per_tok", "n_group", "topk_group", "max_position_embeddings"):
        _at_least(f"model.{key}", getattr(model, key), 1)
    _from_to("model.num_hidden_layers", model.num_hidden_layers, 1, MOST_LAYERS)
    if model.q_lora_rank is not None:
        _from_to("model.q_lora_rank", model.q_lora_rank, 1, LARGEST_SIZE, "null (a plain query projection) or ")
    for key in ("routed_scaling_factor", "rope_theta", "rms_norm_eps"):
        _positive(f"model.{key}", getattr(model, key))
    _at_least("model.initializer_range", model.initializer_range, 0)
    if model.qk_rope_head_dim % 2:
        raise InputError(f"model.qk_rope_head_dim={model.qk_rope_head_dim}: must be even, RoPE rotates pairs")
    if not 0 <= model.first_k_dense_replace <= model.num_hidden_layers:
        raise InputError(f"model.first_k_dense_replace={model.first_k_dense_replace}: must be from 0 to "
                         f"model.num_hidden_layers={model.num_hidden_layers}")
    _router(model)
    _mtp(model)
    if model.rope_scaling is not None:
        _yarn(model.rope_scaling)


def _router(model: ModelConfig) -> None:
    _one_of("model.scoring_func", model.scoring_func, ("sigmoid", "softmax"))
    _one_of("model.topk_method", model.topk_method, ("noaux_tc", "group_limited_greedy", "greedy"))
    experts, groups, kept = model.n_routed_experts, model.n_group, model.topk_group
    if model.topk_method == "greedy" and groups != 1:
        raise InputError(f"model.n_group={groups}: must be 1 with model.topk_method=greedy, which knows no groups")
    if experts % groups:
        raise InputError(f"model.n_routed_experts={experts}: must be divisible by model.n_group={groups}")
    if kept > groups:
        raise InputError(f"model.topk_group={kept}: must be at most model.n_group={groups}")
    if model.topk_method == "noaux_tc" and groups > 1 and experts // groups < 2:
        raise InputError(f"model.n_routed_experts={experts} in model.n_group={groups}: model.topk_method=noaux_tc "
                         "scores a group by its two best experts, so a group needs at least 2")
    if model.num_experts_per_tok > experts // groups * kept:
        raise InputError(f"model.num_experts_per_tok={model.num_experts_per_tok}: must be at most "
                         f"{experts // groups * kept}, the experts in the kept groups "
                         f"(model.n_routed_experts={experts} / model.n_group={groups} * model.topk_group={kept})")


def _mtp(model: ModelConfig) -> None:
    depth, weights = model.num_nextn_predict_layers, model.mtp_depth_weights
    _from_to("model.num_nextn_predict_layers", depth, 0, MOST_LAYERS)
    if weights is None:
        return
    if len(weights) != depth or not weights:
        raise InputError(f"model.mtp_depth_weights={weights}: must be null or one weight for each of "
                         f"model.num_nextn_predict_layers={depth}")
    if any(weight < 0 for weight in weights) or not math.isclose(sum(weights), 1, abs_tol=1e-6):
        raise InputError(f"model.mtp_depth_weights={weights}: must be at least 0 and sum to 1, not {sum(weights):g}")


def _yarn(yarn: YarnConfig) -> None:
    where = "model.rope_scaling"
    _at_least(f"{where}.factor", yarn.factor, 1)
    _at_least(f"{where}.original_max_position_embeddings", yarn.original_max_position_embeddings, 1)
    _positive(f"{where}.beta_slow", yarn.beta_slow)
    if yarn.beta_fast <= yarn.beta_slow:
        raise InputError(f"{where}.beta_fast={yarn.beta_fast}: must be above {where}.beta_slow={yarn.beta_slow}")
    _at_least(f"{where}.mscale", yarn.mscale, 0)
    _at_least(f"{where}.mscale_all_dim", yarn.mscale_all_dim, 0)


def _data(data: DataConfig, model: ModelConfig, tokens: float, trains_tokenizer: bool) -> None:
    _at_least("data.sequence_length", data.sequence_length, 1)
    yarn = model.rope_scaling
    if yarn is None and data.sequence_length > model.max_position_embeddings:
        raise InputError(f"data.sequence_length={data.sequence_length}: must be at most "
                         f"model.max_position_embeddings={model.max_position_embeddings}")
    if yarn is not None and data.sequence_length > yarn.factor * yarn.original_max_position_embeddings:
        limit = int(yarn.factor * yarn.original_max_position_embeddings)
        raise InputError(f"data.sequence_length={data.sequence_length}: must be at most {limit}, "
                         f"model.rope_scaling.factor={yarn.factor:g} times "
                         f"original_max_position_embeddings={yarn.original_max_position_embeddings}")
    _at_least("data.vocab_size", data.vocab_size, 1)
    for key in ("text", "pattern", "train", "heldout", "tokenizer", "cache"):
        if getattr(data, key) == "":  # a path of no letters means the current folder, and an unset variable, never that
            raise InputError(f"data.{key} is empty: give it a value, or leave it out")
    if data.text is not None and data.train is not None:
        raise InputError(f"data.text={data.text} and data.train={data.train}: only one of them can be given, "
                         "text or ready token files")
    _from_to("data.fim_rate", data.fim_rate, 0, 1)
    if data.sources is not None:
        if data.text is not None or data.train is not None:
            raise InputError("data.sources excludes data.text and data.train: only one of them can be given")
        _sources(data.sources, tokens)
    ready = data.train is not None or data.sources is not None
    trains_tokenizer = trains_tokenizer and not ready and data.tokenizer is None
    if trains_tokenizer and data.vocab_size > model.vocab_size:
        raise InputError(f"data.vocab_size={data.vocab_size}: must be at most model.vocab_size={model.vocab_size}")


def _sources(sources: list[SourceConfig], tokens: float) -> None:
    if not sources:
        raise InputError("data.sources is empty: must be at least one source {task, share, train}")
    for i, source in enumerate(sources):
        where = f"data.sources.{i}"
        _given(f"{where}.task", source.task, "a label such as math or code")
        _given(f"{where}.train", source.train, "the prefix of token files")
        _at_least(f"{where}.share", source.share, 0)
        _segments(f"{where}.schedule", source.schedule, tokens)
        if source.fim_rate is not None:
            _from_to(f"{where}.fim_rate", source.fim_rate, 0, 1, "null (data.fim_rate) or ")
    labels = [source.label for source in sources]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise InputError(f"data.sources: two are called {twice!r}; give each a name=… of its own")
    if not any(source.share or any(segment.value for segment in source.schedule) for source in sources):
        raise InputError("data.sources: all shares are 0; at least one must be above")


def _batch(batch: BatchConfig) -> None:
    _from_to("batch.sequences", batch.sequences, 1, LARGEST_BATCH)
    _at_least("batch.micro_sequences", batch.micro_sequences, 1)
    sizes = {"batch.sequences": batch.sequences}
    if batch.ramp is not None:
        sizes |= {"batch.ramp.start": batch.ramp.start, "batch.ramp.multiple": batch.ramp.multiple}
        _at_least("batch.ramp.start", batch.ramp.start, 1)
        _at_least("batch.ramp.multiple", batch.ramp.multiple, 1)
        _positive("batch.ramp.until", batch.ramp.until)
        if batch.ramp.start > batch.sequences:
            raise InputError(f"batch.ramp.start={batch.ramp.start}: must be at most "
                             f"batch.sequences={batch.sequences}, to which it grows")
    for key, size in sizes.items():
        if size % batch.micro_sequences:
            raise InputError(f"{key}={size}: must be divisible by batch.micro_sequences={batch.micro_sequences}")


def _parallel(parallel: ParallelConfig, model: ModelConfig) -> None:
    """What does not depend on the number of ranks; the rest is checked when they have met."""
    _at_least("parallel.pp", parallel.pp, 1)
    _at_least("parallel.ep", parallel.ep, 1)
    if model.n_routed_experts % parallel.ep:
        raise InputError(f"model.n_routed_experts={model.n_routed_experts}: must be divisible by "
                         f"parallel.ep={parallel.ep}")
    _one_of("parallel.schedule", parallel.schedule, SCHEDULES)
    if parallel.ranks_per_node is not None:
        _at_least("parallel.ranks_per_node", parallel.ranks_per_node, 1, "null (as the launcher says) or at least 1")
    for i, count in enumerate(parallel.stages or []):
        _at_least(f"parallel.stages.{i}", count, 1)
    _one_of("parallel.recompute", parallel.recompute, ("none", "block"))
    _one_of("parallel.dispatch", parallel.dispatch, ("compute", "fp8"))
    _positive("parallel.timeout", parallel.timeout)


def _optim(optim: OptimConfig) -> None:
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optim, key) < 1:
            raise InputError(f"optim.{key}={getattr(optim, key)}: must be at least 0 and below 1")
    _positive("optim.eps", optim.eps)
    _positive("optim.grad_clip", optim.grad_clip)
    _at_least("optim.weight_decay", optim.weight_decay, 0)
    _at_least("optim.balance_alpha", optim.balance_alpha, 0)
    _at_least("optim.max_skipped_steps", optim.max_skipped_steps, 1)
    _one_of("optim.moments", optim.moments, ("bf16", "fp32"))


def _schedule(schedule: ScheduleConfig) -> None:
    _positive("schedule.tokens", schedule.tokens)
    if not schedule.learning_rate:
        raise InputError("schedule.learning_rate is empty: must be at least one segment {until, value, shape}")
    for key in ("learning_rate", "bias_speed", "mtp_weight"):
        _segments(f"schedule.{key}", getattr(schedule, key), schedule.tokens)


def _segments(where: str, segments: list[Segment], tokens: float) -> None:
    previous = 0.0
    for i, segment in enumerate(segments):
        key = f"{where}.{i}"
        _at_least(f"{key}.value", segment.value, 0)
        _one_of(f"{key}.shape", segment.shape, SHAPES)
        try:
            end = resolve_until(segment.until, tokens)
        except InputError as error:
            raise InputError(f"{key}.{error}") from None
        if end <= previous:
            before = f"the end of segment {i - 1}, {previous:g} tokens" if i else "0"
            raise InputError(f"{key}.until={segment.until} ({end:g} tokens): must be above {before}")
        previous = end


def _generate(config: GenerateConfig) -> None:
    _given("checkpoint", config.checkpoint, "a run folder or a checkpoint folder, as in checkpoint=runs/tiny")
    _at_least("max_tokens", config.max_tokens, 1)
    _at_least("temperature", config.temperature, 0, "at least 0 (0: greedy)")
    if not 0 <= config.top_p <= 1:
        raise InputError(f"top_p={config.top_p}: must be from 0 to 1")
    if config.top_k is not None:
        _at_least("top_k", config.top_k, 1, "null (all) or at least 1")
    _from_to("seed", config.seed, 0, LARGEST_SEED)
    _one_of("weights", config.weights, WEIGHTS)
    _at_least("drafts", config.drafts, 0, "from 0 (none) to the model's MTP depth")
    if config.compile and config.precision == "fp8":
        raise InputError("compile=true with precision=fp8: blocks are compiled in bf16, fp32 and fp64 only")
    _one_of("precision", config.precision, PRECISIONS)
    _one_of("device", config.device, DEVICES)


def _evaluate(config: EvaluateConfig) -> None:
    _given("checkpoint", config.checkpoint, "a run folder or a checkpoint folder, as in checkpoint=runs/tiny")
    if config.data is not None:
        _given("data", config.data, "null (the run's held-out set), the prefix of token files or a text file")
    _one_of("weights", config.weights, WEIGHTS)
    for key in ("sequences", "sequence_length"):
        if getattr(config, key) is not None:
            _at_least(key, getattr(config, key), 1, "null or at least 1")
    if config.precision is not None:
        _one_of("precision", config.precision, PRECISIONS)
    _one_of("device", config.device, DEVICES)
    _one_of("output", config.output, ("table", "json"))


def _export(config: ExportConfig) -> None:
    _given("checkpoint", config.checkpoint, "a run folder or a checkpoint folder, as in checkpoint=runs/tiny")
    _given("out", config.out, "the folder to write")
    _one_of("weights", config.weights, WEIGHTS)
    _one_of("dtype", config.dtype, ("bf16", "fp32", "fp8"))
    _one_of("fp8_scales", config.fp8_scales, FP8_SCALES)
    parse_size("shard_size", config.shard_size)


def _plan(config: PlanConfig) -> None:
    """What a plan has beyond a training run."""
    ranks, micro_batches = config.parallel.pp, config.batch.micro_batches
    _from_to("parallel.pp", ranks, 1, LARGEST_PLAN)
    if micro_batches is not None:
        _from_to("batch.micro_batches", micro_batches, 1, LARGEST_PLAN // ranks)
    if config.out is not None and not (config.out.endswith(".svg") and "\0" not in config.out):
        raise InputError(f"out={config.out}: must be null or the path of an .svg file")
    _one_of("output", config.output, ("table", "json"))
    _from_to("expert_load", config.expert_load, 1, config.model.n_routed_experts)
    if config.phases is not None:
        _given("phases", config.phases, "null, a file of configs/phases or a path")
    if config.cluster is not None:
        _cluster(config.cluster)


def _cluster(cluster: ClusterConfig) -> None:
    _from_to("cluster.gpus", cluster.gpus, 1, LARGEST_CLUSTER)
    _from_to("cluster.gpus_per_node", cluster.gpus_per_node, 1, LARGEST_CLUSTER)
    for key in ("memory_gib", "bf16_tflops", "memory_gbps", "node_gbps", "network_gbps"):
        _positive(f"cluster.{key}", getattr(cluster, key))
    for key in ("bf16_achieved", "fp8_achieved", "attention_achieved"):
        share = getattr(cluster, key)
        if not 0 < share <= 1:
            raise InputError(f"cluster.{key}={share}: must be above 0 and at most 1, a share of the peak")
    if cluster.fp8_tflops is not None:
        _positive("cluster.fp8_tflops", cluster.fp8_tflops)
    if not 0 <= cluster.reserved_gib < cluster.memory_gib:
        raise InputError(f"cluster.reserved_gib={cluster.reserved_gib}: must be at least 0 and below "
                         f"cluster.memory_gib={cluster.memory_gib}")
    _at_least("cluster.price_per_hour", cluster.price_per_hour, 0)


def _prepare(config: PrepareConfig) -> None:
    _given("from", config.from_, "a file, a folder, or the name of a data set on the Hub")
    _given("out", config.out, "the token files to write, without .bin and .idx")
    if config.out.endswith((".bin", ".idx", "/")):
        raise InputError(f"out={config.out}: must be what the files' names begin with, without .bin and .idx")
    _given("tokenizer", config.tokenizer, "a tokenizer.json")
    _given("column", config.column, "the name of a column")
    _given("split", config.split, "the name of a split, such as train")
    _one_of("format", config.format, ("auto", "text", "jsonl", "parquet", "hub"))
    _one_of("unit", config.unit, ("file", "paragraph", "line"))
    if config.limit is not None:
        _at_least("limit", config.limit, 1, "null (all documents) or at least 1")
    if config.workers is not None:
        _from_to("workers", config.workers, 1, MOST_THREADS, "null (one per core) or ")
    parse_size("shard_size", config.shard_size)


def _given(key: str, path: str, valid: str) -> None:
    if not path or "\0" in path:
        raise InputError(f"{key} is empty or holds a null byte: must be {valid}")


def _at_least(key: str, value: float, least: float, valid: str = "") -> None:
    if not value >= least or value == math.inf:
        raise InputError(f"{key}={value}: must be {valid or f'at least {least}'}")


def _from_to(key: str, value: float, least: float, most: float, valid: str = "") -> None:
    if not least <= value <= most:
        raise InputError(f"{key}={value}: must be {valid}at least {least} and at most {most}")


def _positive(key: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{key}={value}: must be above 0")


def _one_of(key: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise InputError(f"{key}={value}: must be one of {', '.join(valid)}")
