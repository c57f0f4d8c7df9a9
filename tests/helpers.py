"""Small runs for tests: a little text, a model that trains in milliseconds, and the trainer on them."""

import dataclasses
import json
import random
from contextlib import contextmanager
from pathlib import Path

import torch
from oracle import tiny_config

from dstrain.config.compose import compose
from dstrain.config.schema import ModelConfig, TrainConfig

WORDS = "def return for in while if else class import self value list 0 1 2 = + ( ) :".split()


def write_text(path: Path, lines: int = 1500, seed: int = 0) -> Path:
    """A text of random words, lines of 3 to 9."""
    draw = random.Random(seed)
    path.write_text("".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) + "\n" for _ in range(lines)))
    return path


def train_model(**overrides) -> ModelConfig:
    return tiny_config(**{"vocab_size": 320, "initializer_range": 0.05, "num_nextn_predict_layers": 2, **overrides})


def make_config(tmp_path: Path, *overrides: str, model: ModelConfig | None = None) -> TrainConfig:
    """A run on `tmp_path/text.txt`, constant learning rate 1e-3, no evaluation, no periodic checkpoint."""
    text = tmp_path / "text.txt"
    if not text.exists():
        write_text(text)
    defaults = {
        "data.text": str(text), "data.cache": str(tmp_path / "cache"), "data.vocab_size": "300",
        "data.sequence_length": "16", "batch.sequences": "4", "batch.micro_sequences": "4",
        "schedule.tokens": "1e6", "schedule.learning_rate": "[{until: 1e6, value: 1e-3}]",
        "schedule.bias_speed": "[{until: 1e6, value: 0.01}]", "schedule.mtp_weight": "[{until: 1e6, value: 0.3}]",
        "precision": "fp32", "run.dir": str(tmp_path / "runs"), "run.name": "run", "run.steps": "6", "run.threads": "1",
        "eval.every": "0", "eval.at_end": "false", "checkpoint.every": "0", "telemetry.peak_tflops": "1.0",
    }
    given = dict(override.split("=", 1) for override in overrides)
    config, _, _ = compose("train", [f"{key}={value}" for key, value in {**defaults, **given}.items()])
    return dataclasses.replace(config, model=model or train_model())


def run(config: TrainConfig) -> int:
    """`dstrain train` in this process."""
    from dstrain.train.main import train

    return train(config, dataclasses.asdict(config), [])


def metrics(config: TrainConfig) -> list[dict]:
    path = Path(config.run.dir) / config.run.name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def status(config: TrainConfig) -> dict:
    return json.loads((Path(config.run.dir) / config.run.name / "status.json").read_text())


class RandomStream:
    """Random tokens and documents by (seed, sample index)."""

    def __init__(self, config, vocab_size):
        self.width, self.vocab_size = config.data.sequence_length + 1 + config.model.num_nextn_predict_layers, vocab_size

    def batch(self, first, count):
        tokens, documents = [], []
        for i in range(first, first + count):
            generator = torch.Generator().manual_seed(i)
            tokens.append(torch.randint(0, self.vocab_size, (self.width,), generator=generator))
            # Sample 0 has one long document, others many short ones: valid counts differ between micro-batches.
            documents.append((torch.rand(self.width, generator=generator) < 0.15 * (i % 4)).long().cumsum(0))
        return torch.stack(tokens), torch.stack(documents)


@contextmanager
def compiled_kernels():
    """Inside, kernels run compiled; afterwards as before."""
    from dstrain.precision import pointwise

    saved = dict(pointwise._kernels)
    try:
        pointwise.compile_kernels()
        yield
    finally:
        pointwise._kernels.update(saved)
        pointwise.compiled = False
