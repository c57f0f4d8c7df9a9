"""Checks between keys, run once at the start: what would fail deep inside a run fails here in one line instead."""

import re

from dstrain.config.checks import (
    DEVICES, FP8_BACKENDS, FP8_SCALES, LARGEST_BATCH, LARGEST_SEED, MOST_THREADS, PRECISIONS, SCHEDULES, SHAPES,
    at_least, from_to, given, one_of, positive,
)
from dstrain.config.errors import InputError
from dstrain.config.schema import (
    BatchConfig, DataConfig, EvaluateConfig, ExportConfig, GenerateConfig, ImportConfig, ModelConfig, OptimConfig,
    ParallelConfig, PlanConfig, PrecisionConfig, PrepareConfig, ReportConfig, RunConfig, ScheduleConfig, Segment,
    SourceConfig, TelemetryConfig, TrainConfig,
)
from dstrain.config.validate_commands import CHECKS
from dstrain.config.validate_model import check_model

AnyConfig = (
    TrainConfig | GenerateConfig | EvaluateConfig | ExportConfig | ImportConfig | PlanConfig | PrepareConfig | ReportConfig
)
NAME_BYTES = 200  # a file system's 255, less what is put before or after the name


def validate(config: AnyConfig) -> AnyConfig:
    """The configuration itself, if it can run; else InputError naming the keys, their values and what is valid."""
    if (check := CHECKS.get(type(config))) is not None:
        check(config)
    if isinstance(config, TrainConfig):
        _training(config)
    return config


def _training(config: TrainConfig) -> None:
    _run(config.run)
    check_model(config.model)
    _data(config.data, config.model, config.schedule.tokens, trains_tokenizer=config.checkpoint.initial is None)
    _batch(config.batch)
    _precision(config.precision)
    _parallel(config.parallel, config.model)
    _optim(config.optim)
    _schedule(config.schedule)
    at_least("eval.every", config.eval.every, 0)
    at_least("eval.sequences", config.eval.sequences, 1)
    at_least("checkpoint.every", config.checkpoint.every, 0)
    at_least("checkpoint.keep", config.checkpoint.keep, 2)
    if config.checkpoint.initial is not None:
        given("checkpoint.initial", config.checkpoint.initial, "null, a run folder or a checkpoint folder")
    one_of("guard.spikes", config.guard.spikes, ("off", "skip", "rollback"))
    at_least("guard.window", config.guard.window, 2)
    positive("guard.deviations", config.guard.deviations)
    at_least("guard.rollbacks", config.guard.rollbacks, 1)
    if config.ema.decay is not None and not 0 < config.ema.decay < 1:
        raise InputError(f"ema.decay={config.ema.decay}: must be null (no average) or above 0 and below 1")
    at_least("ema.every", config.ema.every, 1)
    _telemetry(config.telemetry)


def _telemetry(telemetry: TelemetryConfig) -> None:
    at_least("telemetry.log_every", telemetry.log_every, 1)
    if telemetry.peak_tflops is not None:
        positive("telemetry.peak_tflops", telemetry.peak_tflops)
    one_of("telemetry.wandb", telemetry.wandb, ("auto", "online", "offline", "disabled"))
    for key, most in (("project", 128), ("entity", 128), ("group", 128), ("name", 1024)):
        value, bad = getattr(telemetry, f"wandb_{key}"), r"[/\\#?%:]" if key == "project" else r"\0"
        if value is not None and (not 0 < len(value.strip()) <= most or re.search(bad, value)):
            raise InputError(f"telemetry.wandb_{key}={value!r}: must be null or text of at most {most} characters"
                             + (", none of them one of /\\#?%:" if key == "project" else ""))


def _precision(precision: PrecisionConfig) -> None:
    one_of("precision.name", precision.name, PRECISIONS)
    one_of("precision.backend", precision.backend, FP8_BACKENDS)
    one_of("precision.scales", precision.scales, FP8_SCALES)
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
    from_to("run.seed", run.seed, 0, LARGEST_SEED)
    if run.steps is not None:
        at_least("run.steps", run.steps, 1, "null (the schedule's tokens) or at least 1")
    one_of("run.device", run.device, DEVICES)
    if run.threads is not None:
        from_to("run.threads", run.threads, 1, MOST_THREADS, "null (one per core) or ")


def _data(data: DataConfig, model: ModelConfig, tokens: float, trains_tokenizer: bool) -> None:
    at_least("data.sequence_length", data.sequence_length, 1)
    yarn = model.rope_scaling
    if yarn is None and data.sequence_length > model.max_position_embeddings:
        raise InputError(f"data.sequence_length={data.sequence_length}: must be at most "
                         f"model.max_position_embeddings={model.max_position_embeddings}")
    if yarn is not None and data.sequence_length > yarn.factor * yarn.original_max_position_embeddings:
        limit = int(yarn.factor * yarn.original_max_position_embeddings)
        raise InputError(f"data.sequence_length={data.sequence_length}: must be at most {limit}, "
                         f"model.rope_scaling.factor={yarn.factor:g} times "
                         f"original_max_position_embeddings={yarn.original_max_position_embeddings}")
    at_least("data.vocab_size", data.vocab_size, 1)
    for key in ("text", "pattern", "train", "heldout", "tokenizer", "cache"):
        if getattr(data, key) == "":  # a path of no letters means the current folder, and an unset variable, never that
            raise InputError(f"data.{key} is empty: give it a value, or leave it out")
    if data.text is not None and data.train is not None:
        raise InputError(f"data.text={data.text} and data.train={data.train}: only one of them can be given, "
                         "text or ready token files")
    from_to("data.fim_rate", data.fim_rate, 0, 1)
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
        given(f"{where}.task", source.task, "a label such as math or code")
        given(f"{where}.train", source.train, "the prefix of token files")
        at_least(f"{where}.share", source.share, 0)
        _segments(f"{where}.schedule", source.schedule, tokens)
        if source.fim_rate is not None:
            from_to(f"{where}.fim_rate", source.fim_rate, 0, 1, "null (data.fim_rate) or ")
    labels = [source.label for source in sources]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise InputError(f"data.sources: two are called {twice!r}; give each a name=… of its own")
    if not any(source.share or any(segment.value for segment in source.schedule) for source in sources):
        raise InputError("data.sources: all shares are 0; at least one must be above")


def _batch(batch: BatchConfig) -> None:
    from_to("batch.sequences", batch.sequences, 1, LARGEST_BATCH)
    at_least("batch.micro_sequences", batch.micro_sequences, 1)
    sizes = {"batch.sequences": batch.sequences}
    if batch.ramp is not None:
        sizes |= {"batch.ramp.start": batch.ramp.start, "batch.ramp.multiple": batch.ramp.multiple}
        at_least("batch.ramp.start", batch.ramp.start, 1)
        at_least("batch.ramp.multiple", batch.ramp.multiple, 1)
        positive("batch.ramp.until", batch.ramp.until)
        if batch.ramp.start > batch.sequences:
            raise InputError(f"batch.ramp.start={batch.ramp.start}: must be at most "
                             f"batch.sequences={batch.sequences}, to which it grows")
    for key, size in sizes.items():
        if size % batch.micro_sequences:
            raise InputError(f"{key}={size}: must be divisible by batch.micro_sequences={batch.micro_sequences}")


def _parallel(parallel: ParallelConfig, model: ModelConfig) -> None:
    """What does not depend on the number of ranks; the rest is checked when they have met."""
    at_least("parallel.pp", parallel.pp, 1)
    at_least("parallel.ep", parallel.ep, 1)
    if model.n_routed_experts % parallel.ep:
        raise InputError(f"model.n_routed_experts={model.n_routed_experts}: must be divisible by "
                         f"parallel.ep={parallel.ep}")
    one_of("parallel.schedule", parallel.schedule, SCHEDULES)
    if parallel.ranks_per_node is not None:
        at_least("parallel.ranks_per_node", parallel.ranks_per_node, 1, "null (as the launcher says) or at least 1")
    for i, count in enumerate(parallel.stages or []):
        at_least(f"parallel.stages.{i}", count, 1)
    one_of("parallel.recompute", parallel.recompute, ("none", "block"))
    one_of("parallel.dispatch", parallel.dispatch, ("compute", "fp8"))
    positive("parallel.timeout", parallel.timeout)


def _optim(optim: OptimConfig) -> None:
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optim, key) < 1:
            raise InputError(f"optim.{key}={getattr(optim, key)}: must be at least 0 and below 1")
    positive("optim.eps", optim.eps)
    positive("optim.grad_clip", optim.grad_clip)
    at_least("optim.weight_decay", optim.weight_decay, 0)
    at_least("optim.balance_alpha", optim.balance_alpha, 0)
    at_least("optim.max_skipped_steps", optim.max_skipped_steps, 1)
    one_of("optim.moments", optim.moments, ("bf16", "fp32"))


def _schedule(schedule: ScheduleConfig) -> None:
    positive("schedule.tokens", schedule.tokens)
    if not schedule.learning_rate:
        raise InputError("schedule.learning_rate is empty: must be at least one segment {until, value, shape}")
    for key in ("learning_rate", "bias_speed", "mtp_weight"):
        _segments(f"schedule.{key}", getattr(schedule, key), schedule.tokens)


def _segments(where: str, segments: list[Segment], tokens: float) -> None:
    previous = 0.0
    for i, segment in enumerate(segments):
        key = f"{where}.{i}"
        at_least(f"{key}.value", segment.value, 0)
        one_of(f"{key}.shape", segment.shape, SHAPES)
        try:
            end = resolve_until(segment.until, tokens)
        except InputError as error:
            raise InputError(f"{key}.{error}") from None
        if end <= previous:
            before = f"the end of segment {i - 1}, {previous:g} tokens" if i else "0"
            raise InputError(f"{key}.until={segment.until} ({end:g} tokens): must be above {before}")
        previous = end
