"""Checks of what each command but `train` is asked for."""

from dstrain.config.checks import (
    DEVICES, FP8_SCALES, LARGEST_CLUSTER, LARGEST_PLAN, LARGEST_SEED, MOST_THREADS, PRECISIONS, WEIGHTS, at_least,
    from_to, given, one_of, parse_size, positive,
)
from dstrain.config.errors import InputError
from dstrain.config.schema import (
    ClusterConfig, EvaluateConfig, ExportConfig, GenerateConfig, ImportConfig, PlanConfig, PrepareConfig, ReportConfig,
)


def check_generate(config: GenerateConfig) -> None:
    given("checkpoint", config.checkpoint, "a run folder or a checkpoint folder, as in checkpoint=runs/tiny")
    at_least("max_tokens", config.max_tokens, 1)
    at_least("temperature", config.temperature, 0, "at least 0 (0: greedy)")
    if not 0 <= config.top_p <= 1:
        raise InputError(f"top_p={config.top_p}: must be from 0 to 1")
    if config.top_k is not None:
        at_least("top_k", config.top_k, 1, "null (all) or at least 1")
    from_to("seed", config.seed, 0, LARGEST_SEED)
    one_of("weights", config.weights, WEIGHTS)
    at_least("drafts", config.drafts, 0, "from 0 (none) to the model's MTP depth")
    if config.compile and config.precision == "fp8":
        raise InputError("compile=true with precision=fp8: blocks are compiled in bf16, fp32 and fp64 only")
    one_of("precision", config.precision, PRECISIONS)
    one_of("device", config.device, DEVICES)


def check_evaluate(config: EvaluateConfig) -> None:
    given("checkpoint", config.checkpoint, "a run folder or a checkpoint folder, as in checkpoint=runs/tiny")
    if config.data is not None:
        given("data", config.data, "null (the run's held-out set), the prefix of token files or a text file")
    one_of("weights", config.weights, WEIGHTS)
    for key in ("sequences", "sequence_length"):
        if getattr(config, key) is not None:
            at_least(key, getattr(config, key), 1, "null or at least 1")
    if config.precision is not None:
        one_of("precision", config.precision, PRECISIONS)
    one_of("device", config.device, DEVICES)
    one_of("output", config.output, ("table", "json"))


def check_export(config: ExportConfig) -> None:
    given("checkpoint", config.checkpoint, "a run folder or a checkpoint folder, as in checkpoint=runs/tiny")
    given("out", config.out, "the folder to write")
    one_of("weights", config.weights, WEIGHTS)
    one_of("dtype", config.dtype, ("bf16", "fp32", "fp8"))
    one_of("fp8_scales", config.fp8_scales, FP8_SCALES)
    parse_size("shard_size", config.shard_size)


def check_plan(config: PlanConfig) -> None:
    """What a plan has beyond a training run."""
    ranks, micro_batches = config.parallel.pp, config.batch.micro_batches
    from_to("parallel.pp", ranks, 1, LARGEST_PLAN)
    if micro_batches is not None:
        from_to("batch.micro_batches", micro_batches, 1, LARGEST_PLAN // ranks)
    if config.out is not None and not (config.out.endswith(".svg") and "\0" not in config.out):
        raise InputError(f"out={config.out}: must be null or the path of an .svg file")
    one_of("output", config.output, ("table", "json"))
    from_to("expert_load", config.expert_load, 1, config.model.n_routed_experts)
    if config.phases is not None:
        given("phases", config.phases, "null, a file of configs/phases or a path")
    if config.cluster is not None:
        _cluster(config.cluster)


def _cluster(cluster: ClusterConfig) -> None:
    from_to("cluster.gpus", cluster.gpus, 1, LARGEST_CLUSTER)
    from_to("cluster.gpus_per_node", cluster.gpus_per_node, 1, LARGEST_CLUSTER)
    for key in ("memory_gib", "bf16_tflops", "memory_gbps", "node_gbps", "network_gbps"):
        positive(f"cluster.{key}", getattr(cluster, key))
    for key in ("bf16_achieved", "fp8_achieved", "attention_achieved"):
        share = getattr(cluster, key)
        if not 0 < share <= 1:
            raise InputError(f"cluster.{key}={share}: must be above 0 and at most 1, a share of the peak")
    if cluster.fp8_tflops is not None:
        positive("cluster.fp8_tflops", cluster.fp8_tflops)
    if not 0 <= cluster.reserved_gib < cluster.memory_gib:
        raise InputError(f"cluster.reserved_gib={cluster.reserved_gib}: must be at least 0 and below "
                         f"cluster.memory_gib={cluster.memory_gib}")
    at_least("cluster.price_per_hour", cluster.price_per_hour, 0)


def check_prepare(config: PrepareConfig) -> None:
    given("from", config.from_, "a file, a folder, or the name of a data set on the Hub")
    given("out", config.out, "the token files to write, without .bin and .idx")
    if config.out.endswith((".bin", ".idx", "/")):
        raise InputError(f"out={config.out}: must be what the files' names begin with, without .bin and .idx")
    given("tokenizer", config.tokenizer, "a tokenizer.json")
    given("column", config.column, "the name of a column")
    given("split", config.split, "the name of a split, such as train")
    one_of("format", config.format, ("auto", "text", "jsonl", "parquet", "hub"))
    one_of("unit", config.unit, ("file", "paragraph", "line"))
    if config.limit is not None:
        at_least("limit", config.limit, 1, "null (all documents) or at least 1")
    if config.workers is not None:
        from_to("workers", config.workers, 1, MOST_THREADS, "null (one per core) or ")
    parse_size("shard_size", config.shard_size)


def check_import(config: ImportConfig) -> None:
    given("from", config.from_, "a Hugging Face folder")
    given("out", config.out, "the checkpoint folder to write")


def check_report(config: ReportConfig) -> None:
    given("run", config.run, "a run folder, as in run=runs/tiny, or several as in run=runs/a,runs/b")
    if config.out is not None:
        given("out", config.out, "null or the page to write, as in out=report.html")


CHECKS = {
    GenerateConfig: check_generate,
    EvaluateConfig: check_evaluate,
    ExportConfig: check_export,
    ImportConfig: check_import,
    PlanConfig: check_plan,
    PrepareConfig: check_prepare,
    ReportConfig: check_report,
}
