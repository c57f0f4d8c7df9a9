"""validate.py: impossible configurations are refused in one line that names keys and values (FAULTS D10)."""

import dataclasses

import pytest

from dstrain.config.build import build
from dstrain.config.compose import compose
from dstrain.config.errors import InputError
from dstrain.config.schema import GenerateConfig, TrainConfig
from dstrain.config.validate import resolve_until, validate


# The numbers that the lines below speak of, whatever the files of configs/ hold.
FIXED = [
    "run.dir=/nonexistent",
    "model={vocab_size:4096,num_hidden_layers:4,n_routed_experts:16,num_experts_per_tok:4,n_group:4,topk_group:2}",
    "model.num_nextn_predict_layers=1",
    "model.max_position_embeddings=1024",
    "data={sequence_length:256,vocab_size:4096}",
    "batch={sequences:8,micro_sequences:8}",
    "schedule.tokens=2e6",
]


@pytest.fixture(scope="module")
def plain():
    return compose("train", FIXED)[1]


def changed(plain: dict, changes: dict) -> TrainConfig:
    tree = dataclasses.asdict(build(TrainConfig, plain))
    for key, value in changes.items():
        *groups, leaf = key.split(".")
        here = tree
        for group in groups:
            here = here[int(group)] if isinstance(here, list) else here[group]
        here[leaf] = value
    return build(TrainConfig, tree)


YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
RAMP = {"start": 8, "until": 1e6, "multiple": 8}
SEGMENTS = [{"until": "10%", "value": 1.0}, {"until": "100%", "value": 0.5, "shape": "cosine"}]

# changes to the tiny model's configuration -> what the line must say
IMPOSSIBLE = [
    ({"model.qk_rope_head_dim": 7}, "model.qk_rope_head_dim=7: must be even"),
    ({"model.qk_rope_head_dim": 0}, "model.qk_rope_head_dim=0: must be at least 1"),
    ({"model.hidden_size": 0}, "model.hidden_size=0: must be at least 1"),
    ({"model.vocab_size": -1}, "model.vocab_size=-1"),
    ({"model.num_hidden_layers": 0}, "model.num_hidden_layers=0"),
    ({"model.q_lora_rank": 0}, "model.q_lora_rank=0: must be null"),
    ({"model.hidden_size": 2**62}, "model.hidden_size=4611686018427387904: must be at least 1 and at most 1048576"),
    ({"model.num_hidden_layers": 10**6}, "model.num_hidden_layers=1000000: must be at least 1 and at most 4096"),
    ({"model.num_nextn_predict_layers": 10**6}, "model.num_nextn_predict_layers=1000000: must be at least 0 and at most"),
    ({"run.seed": 2**64}, "run.seed=18446744073709551616: must be at least 0 and at most 18446744073709551615"),
    ({"run.threads": 10**6}, "run.threads=1000000: must be null (one per core) or at least 1 and at most 4096"),
    ({"batch.sequences": 10**12}, "batch.sequences=1000000000000: must be at least 1 and at most 1048576"),
    ({"data.text": ""}, "data.text is empty"),
    ({"data.cache": ""}, "data.cache is empty"),
    ({"model.rope_theta": 0}, "model.rope_theta=0.0: must be above 0"),
    ({"model.rms_norm_eps": 0}, "model.rms_norm_eps=0.0: must be above 0"),
    ({"model.routed_scaling_factor": -1}, "model.routed_scaling_factor=-1.0"),
    ({"model.initializer_range": -0.1}, "model.initializer_range=-0.1"),
    ({"model.first_k_dense_replace": 5}, "model.first_k_dense_replace=5: must be from 0 to model.num_hidden_layers=4"),
    ({"model.n_routed_experts": 18}, "model.n_routed_experts=18: must be divisible by model.n_group=4"),
    ({"model.topk_group": 5}, "model.topk_group=5: must be at most model.n_group=4"),
    ({"model.n_group": 16, "model.topk_group": 4}, "model.n_routed_experts=16 in model.n_group=16"),
    ({"model.num_experts_per_tok": 9}, "model.num_experts_per_tok=9: must be at most 8, the experts in the kept"),
    ({"model.topk_method": "greedy"}, "model.n_group=4: must be 1 with model.topk_method=greedy"),
    ({"model.topk_method": "noaux"}, "model.topk_method=noaux: must be one of noaux_tc, group_limited_greedy, greedy"),
    ({"model.scoring_func": "relu"}, "model.scoring_func=relu: must be one of sigmoid, softmax"),
    ({"model.num_nextn_predict_layers": -1}, "model.num_nextn_predict_layers=-1"),
    ({"model.mtp_depth_weights": [0.5, 0.5]}, "one weight for each of model.num_nextn_predict_layers=1"),
    ({"model.num_nextn_predict_layers": 0, "model.mtp_depth_weights": []}, "model.mtp_depth_weights=[]: must be null"),
    ({"model.num_nextn_predict_layers": 2, "model.mtp_depth_weights": [0.5, 0.6]}, "sum to 1, not 1.1"),
    ({"model.num_nextn_predict_layers": 2, "model.mtp_depth_weights": [1.5, -0.5]}, "must be at least 0"),
    ({"model.rope_scaling": YARN | {"factor": 0.5}}, "model.rope_scaling.factor=0.5: must be at least 1"),
    ({"model.rope_scaling": YARN | {"original_max_position_embeddings": 0}},
     "original_max_position_embeddings=0: must be"),
    ({"model.rope_scaling": YARN | {"beta_fast": 1.0}},
     "beta_fast=1.0: must be above model.rope_scaling.beta_slow=1.0"),
    ({"model.rope_scaling": YARN | {"beta_slow": 0.0}}, "beta_slow=0.0: must be above 0"),
    ({"model.rope_scaling": YARN | {"mscale": -1.0}}, "mscale=-1.0"),
    ({"model.rope_scaling": YARN | {"mscale_all_dim": -1.0}}, "mscale_all_dim=-1.0"),
    ({"data.sequence_length": 0}, "data.sequence_length=0"),
    ({"data.sequence_length": 1025}, "data.sequence_length=1025: must be at most model.max_position_embeddings=1024"),
    ({"data.sequence_length": 1025, "model.rope_scaling": YARN}, "must be at most 1024, model.rope_scaling.factor=4"),
    ({"data.vocab_size": 0}, "data.vocab_size=0: must be at least 1"),
    ({"data.vocab_size": 4097}, "data.vocab_size=4097: must be at most model.vocab_size=4096"),
    ({"data.text": "a", "data.train": "b"}, "data.text=a and data.train=b: only one"),
    ({"batch.sequences": 0}, "batch.sequences=0: must be at least 1"),
    ({"batch.micro_sequences": 0}, "batch.micro_sequences=0: must be at least 1"),
    ({"batch.micro_sequences": 3}, "batch.sequences=8: must be divisible by batch.micro_sequences=3"),
    ({"batch.ramp": RAMP | {"start": 4}}, "batch.ramp.start=4: must be divisible by batch.micro_sequences=8"),
    ({"batch.ramp": RAMP | {"multiple": 4}}, "batch.ramp.multiple=4: must be divisible by batch.micro_sequences=8"),
    ({"batch.ramp": RAMP | {"start": 0}}, "batch.ramp.start=0: must be at least 1"),
    ({"batch.ramp": RAMP | {"multiple": -8}}, "batch.ramp.multiple=-8: must be at least 1"),
    ({"batch.ramp": RAMP | {"start": 16}}, "batch.ramp.start=16: must be at most batch.sequences=8"),
    ({"batch.ramp": RAMP | {"until": 0}}, "batch.ramp.until=0.0: must be above 0"),
    ({"precision.name": "fp4"}, "precision.name=fp4: must be one of auto, fp32, bf16, fp8, fp64"),
    ({"precision.name": "fp8", "precision.backend": "cublas"}, "precision.backend=cublas: must be one of auto, emulated"),
    ({"precision.name": "fp8", "precision.scales": "ue8m0"}, "precision.scales=ue8m0: must be one of power_of_two, fp32"),
    ({"precision.name": "bf16", "precision.scales": "fp32"}, "precision.scales=fp32 need precision.name=fp8, not bf16"),
    ({"parallel.pp": 0}, "parallel.pp=0: must be at least 1"),
    ({"parallel.ep": 0}, "parallel.ep=0: must be at least 1"),
    ({"parallel.stages": [3, 0]}, "parallel.stages.1=0: must be at least 1"),
    ({"parallel.ranks_per_node": 0}, "parallel.ranks_per_node=0: must be null (as the launcher says) or at least 1"),
    ({"parallel.dispatch": "fp16"}, "parallel.dispatch=fp16: must be one of compute, fp8"),
    ({"parallel.timeout": 0}, "parallel.timeout=0.0: must be above 0"),
    ({"parallel.ep": 3}, "model.n_routed_experts=16: must be divisible by parallel.ep=3"),
    ({"parallel.schedule": "gpipe"}, "parallel.schedule=gpipe: must be one of 1f1b, zb1p, dualpipe, dualpipev"),
    ({"parallel.recompute": "all"}, "parallel.recompute=all: must be one of none, block"),
    ({"optim.beta1": 1.0}, "optim.beta1=1.0: must be at least 0 and below 1"),
    ({"optim.beta2": -0.1}, "optim.beta2=-0.1"),
    ({"optim.eps": 0}, "optim.eps=0.0: must be above 0"),
    ({"optim.grad_clip": 0}, "optim.grad_clip=0.0: must be above 0"),
    ({"optim.weight_decay": -1}, "optim.weight_decay=-1.0"),
    ({"optim.balance_alpha": -1}, "optim.balance_alpha=-1.0"),
    ({"optim.max_skipped_steps": 0}, "optim.max_skipped_steps=0"),
    ({"guard.spikes": "on"}, "guard.spikes=on"),
    ({"guard.window": 1}, "guard.window=1"),
    ({"guard.deviations": 0.0}, "guard.deviations=0.0"),
    ({"guard.rollbacks": 0}, "guard.rollbacks=0"),
    ({"ema.decay": 1.0}, "ema.decay=1.0"),
    ({"ema.decay": 0.0}, "ema.decay=0.0"),
    ({"ema.every": 0}, "ema.every=0"),
    ({"optim.moments": "fp8"}, "optim.moments=fp8: must be one of bf16, fp32"),
    ({"schedule.tokens": 0}, "schedule.tokens=0.0: must be above 0"),
    ({"schedule.learning_rate": []}, "schedule.learning_rate is empty"),
    ({"schedule.learning_rate": SEGMENTS[::-1]}, "schedule.learning_rate.1.until=10% (200000 tokens): must be above"),
    ({"schedule.bias_speed": [{"until": "101%", "value": 1}]}, "schedule.bias_speed.0.until: '101%' is neither"),
    ({"schedule.mtp_weight": [{"until": "ten", "value": 1}]}, "schedule.mtp_weight.0.until: 'ten' is neither"),
    ({"schedule.mtp_weight": [{"until": 0, "value": 1}]}, "schedule.mtp_weight.0.until=0.0 (0 tokens): must be above"),
    ({"schedule.learning_rate.0.value": -1e-3}, "schedule.learning_rate.0.value=-0.001: must be at least 0"),
    ({"schedule.learning_rate.0.shape": "step"}, "schedule.learning_rate.0.shape=step: must be one of constant,"),
    ({"eval.every": -1}, "eval.every=-1: must be at least 0"),
    ({"eval.sequences": 0}, "eval.sequences=0"),
    ({"checkpoint.every": -1}, "checkpoint.every=-1: must be at least 0"),
    ({"checkpoint.keep": 1}, "checkpoint.keep=1: must be at least 2"),
    ({"telemetry.log_every": 0}, "telemetry.log_every=0"),
    ({"telemetry.peak_tflops": 0}, "telemetry.peak_tflops=0.0: must be above 0"),
    ({"run.steps": 0}, "run.steps=0: must be null (the schedule's tokens) or at least 1"),
    ({"run.seed": -1}, "run.seed=-1"),
    ({"run.threads": 0}, "run.threads=0"),
    ({"run.device": "tpu"}, "run.device=tpu: must be one of auto, cpu, cuda"),
    ({"run.dir": ""}, "run.dir: '' is not a folder"),
    *(({"run.name": name}, f"run.name: {name!r} cannot name a folder")
      for name in ("", "  ", ".", "..", "a/b", "a\\b", "a\nb", "a\0b", "x" * 201)),
]


@pytest.mark.parametrize(("changes", "line"), IMPOSSIBLE, ids=[" ".join(changes) for changes, _ in IMPOSSIBLE])
def test_impossible_training_is_refused_in_one_line(plain, changes, line):
    with pytest.raises(InputError) as caught:
        validate(changed(plain, changes))
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.num_experts_per_tok": 8},  # every expert of the two kept groups of four
        {"model.n_group": 1, "model.topk_group": 1, "model.topk_method": "greedy"},
        {"model.n_group": 16, "model.topk_group": 4, "model.topk_method": "group_limited_greedy"},
        {"model.first_k_dense_replace": 4},
        {"model.first_k_dense_replace": 0, "model.num_nextn_predict_layers": 0},
        {"model.num_nextn_predict_layers": 3, "model.mtp_depth_weights": [0.5, 0.3, 0.2]},
        {"data.sequence_length": 1024},
        {"data.sequence_length": 2048, "model.rope_scaling": YARN | {"original_max_position_embeddings": 512}},
        {"data.vocab_size": 9999, "data.train": "ready"},  # no tokenizer is trained then
        {"batch.ramp": RAMP},
        {"run.steps": 1, "run.threads": 1, "checkpoint.keep": 2, "checkpoint.every": 0, "eval.every": 0},
        {"run.name": "1e5"},
        {"run.name": "a b=ü,{"},
        {"schedule.bias_speed": [], "schedule.mtp_weight": []},
        {"schedule.mtp_weight": [{"until": 5, "value": 0.3}, {"until": "100%", "value": 0}]},
    ],
)
def test_limits_themselves_are_valid(plain, changes):
    validate(changed(plain, changes))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("max_tokens", 0, "max_tokens=0: must be at least 1"),
        ("max_tokens", -1, "max_tokens=-1: must be at least 1"),
        ("temperature", -0.1, "temperature=-0.1: must be at least 0 (0: greedy)"),
        ("top_p", -0.1, "top_p=-0.1: must be from 0 to 1"),
        ("top_p", 1.1, "top_p=1.1: must be from 0 to 1"),
        ("top_k", 0, "top_k=0: must be null (all) or at least 1"),
        ("seed", -1, "seed=-1"),
        ("precision", "fp4", "precision=fp4: must be one of"),
        ("device", "tpu", "device=tpu: must be one of"),
        ("checkpoint", "", "checkpoint is empty"),
    ],
)
def test_impossible_generation_is_refused(key, value, line):
    with pytest.raises(InputError) as caught:
        validate(build(GenerateConfig, {"checkpoint": "x", key: value}))
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", 0), ("top_p", 0), ("top_p", 1), ("top_k", 1), ("max_tokens", 1)]
)
def test_limits_of_generation_are_valid(key, value):
    validate(build(GenerateConfig, {"checkpoint": "x", key: value}))


@pytest.mark.parametrize(
    ("until", "right"), [(5, 5.0), (1e9, 1e9), ("2%", 20.0), ("2.5 %", 25.0), (".5%", 5.0), ("100%", 1000.0)]
)
def test_end_of_a_segment_in_tokens(until, right):
    assert resolve_until(until, 1000) == right


@pytest.mark.parametrize("until", ["0%", "-1%", "100.1%", "%", "x%", "5", "nan%", "1e1%"])
def test_end_that_is_no_percentage_is_refused(until):
    with pytest.raises(InputError, match="percentage"):
        resolve_until(until, 1000)
