"""Run folders for tests of the report, written by hand, and what a page holds."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import yaml


def row(step: int, layers: int = 0, experts: int = 4, **changed) -> dict:
    """A line of metrics.jsonl as the trainer writes it; loss 8 - step / 1000, load even."""
    main = 8 - step / 1000
    return {
        "step": step, "tokens": 1000 * step, "samples": 4 * step, "loss": main + 1, "loss_main": main,
        "loss_mtp": [main + 0.25, main + 0.5], "loss_balance": 2.0, "lr": 1e-3, "grad_norm": 1 + step / 7,
        "step_time": 2.0, "tokens_per_second": 500.0, "moe_max_violation": 0.5,
        "moe_load": [[10] * experts for _ in range(layers)], "bias_speed": 1e-3, "mtp_weight": 0.3,
        "batch_sequences": 4, "skipped": False, "mfu": 0.4, "data_epochs": {"train": step / 100}, **changed,
    }


def evaluation(step: int, whole: bool = False) -> dict:
    loss = 8.5 - step / 1000
    return {"step": step, "tokens": 1000 * step, "loss": loss, "loss_mtp": [loss + 0.25, loss + 0.5],
            "accuracy": step / 1000, "accuracy_mtp": [step / 2000, step / 4000], "bits_per_byte": loss / math.log(2) / 4, "heldout_tokens": 640, "heldout_bytes": 2560, "whole": whole}


def write_run(folder: Path, rows: list[dict], evaluations: list[dict] = (), config: dict | None = None,
              status: dict | None = None, separators: tuple[str, str] = (", ", ": ")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("metrics.jsonl", rows), ("eval.jsonl", evaluations)):
        (folder / name).write_text("".join(json.dumps(record, separators=separators) + "\n" for record in records))
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


def config(dense: int = 1, layers: int = 3, depth: int = 2, **run) -> dict:
    return {"run": {"name": "run", "seed": 1, **run}, "schedule": {"tokens": 1e6}, "precision": {"name": "fp8"},
            "parallel": {"pp": 2, "ep": 1},
            "model": {"name": "m", "first_k_dense_replace": dense, "num_hidden_layers": layers,
                      "num_nextn_predict_layers": depth}}


class Page(HTMLParser):
    """A report as its browser sees it: scripts, visible text, and the numbers of the charts."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.scripts, self.texts, self.tags, self.inside = [], [], [], []
        self.feed(self.source)
        self.numbers = json.loads(self.scripts[0])
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.texts.append(data)
        elif self.inside[-1] == "script":
            self.scripts.append(data)

    @property
    def titles(self) -> list[str]:
        return [panel["title"] for panel in self.numbers["panels"]]
