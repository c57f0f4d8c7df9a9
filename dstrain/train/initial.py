"""Starting a run from the weights of another checkpoint: `checkpoint.initial`.

Architecture and tokenizer are the checkpoint's; optimizer, schedules and data start anew. Once the run has a checkpoint
of its own, that one takes this role, so a continued run does not need the other any more.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from dstrain.checkpoint.find import find_checkpoint
from dstrain.checkpoint.hf_tokenizer import CARRIED, TOKENIZER
from dstrain.checkpoint.store import FILES, CheckpointStore
from dstrain.config.build import build, plain_of
from dstrain.config.errors import InputError
from dstrain.config.run_files import differences
from dstrain.config.schema import ModelConfig, TrainConfig
from dstrain.model.model import Model
from dstrain.train.optimizer import AdamW
from dstrain.train.state import architecture, load_weights, set_initial

DEPTH = "num_nextn_predict_layers"


def own_checkpoint(run_dir: str, run_name: str) -> Path | None:
    """The newest complete checkpoint of the run itself."""
    return CheckpointStore(Path(run_dir) / run_name / "checkpoints", keep=2).newest()


def adopt(plain: dict, overrides: list[Any]) -> dict:
    """`plain`, a train configuration as containers, with the model of its checkpoint.initial in place of its own.

    overrides: what the user asked for (`overrides.Override`). Single keys of the model count on top of the checkpoint's;
    InputError where they, or an explicit `model=`, make it another architecture. The MTP depth may be 0 or larger.
    """
    where, run = plain["checkpoint"]["initial"], plain["run"]
    path = own_checkpoint(run["dir"], run["name"]) or find_checkpoint(
        where, lambda line: None, "checkpoint.initial", verified=False
    )
    theirs = stored_model(path)
    asked = {o.key.split(".")[1] for o in overrides if not o.is_group and o.key.startswith("model.")}
    if any(o.key == "model" and not o.is_group for o in overrides):
        raise InputError("model={…} with checkpoint.initial: give its keys one by one, as in model.rope_scaling=…")
    chosen = [o.value for o in overrides if o.is_group and o.key == "model"]
    if chosen:
        _require_same(path, theirs, build(ModelConfig, plain["model"], "model"), f"model={chosen[-1]}")
        asked |= {DEPTH, "mtp_depth_weights"}
    model = plain_of(theirs) | {key: plain["model"][key] for key in asked}
    if model[DEPTH] != theirs.num_nextn_predict_layers and "mtp_depth_weights" not in asked:
        model["mtp_depth_weights"] = None  # the checkpoint's belong to its own depth
    ours = build(ModelConfig, model, "model")
    _require_same(path, theirs, ours, "keys of the model")
    if 0 < ours.num_nextn_predict_layers < theirs.num_nextn_predict_layers:
        raise InputError(
            f"model.{DEPTH}={ours.num_nextn_predict_layers}: {path} has {theirs.num_nextn_predict_layers} MTP modules; "
            f"valid: 0 (they are dropped) or at least {theirs.num_nextn_predict_layers}"
        )
    return plain | {"model": plain_of(ours)}


def with_tokenizer(config: TrainConfig, path: Path) -> TrainConfig:
    """The configuration with the tokenizer of checkpoint `path`, unless it names one."""
    if config.data.tokenizer is not None:
        return config
    tokenizer = path / FILES / TOKENIZER
    if not tokenizer.is_file():
        raise InputError(f"checkpoint.initial: {path} has no tokenizer; give data.tokenizer=…, a tokenizer.json")
    return replace(config, data=replace(config.data, tokenizer=str(tokenizer)))


def carried_files(config: TrainConfig, path: Path) -> dict[str, bytes]:
    """Files of checkpoint `path` that belong to its tokenizer, for the checkpoints of a run that uses that."""
    if config.data.tokenizer is not None:
        return {}
    stored = CheckpointStore.files(path)
    return {name: data for name, data in stored.items() if name in CARRIED and name != TOKENIZER}


def stored_model(path: Path) -> ModelConfig:
    return build(ModelConfig, yaml.safe_load(CheckpointStore.file(path, "config.yaml"))["model"], "model")


def start_from(model: Model, optimizer: AdamW, path: Path, seed: int) -> list[str]:
    """Fill the model from checkpoint `path`. -> lines that name what was dropped and what starts from initial values.

    Only MTP modules may be either; every other difference is an InputError.
    """
    theirs, ours = stored_model(path), model.config
    _require_same(path, theirs, ours, "the configuration")
    first = ours.num_hidden_layers
    depth, stored_depth = ours.num_nextn_predict_layers, theirs.num_nextn_predict_layers
    lines = []
    if depth < stored_depth:
        lines.append(f"dropped: the {stored_depth} MTP modules of the checkpoint, {_layers(first, stored_depth)}")
    if depth > stored_depth:
        lines.append(
            f"not in the checkpoint, starting from initial values: {depth - stored_depth} MTP modules, "
            f"{_layers(first + stored_depth, depth - stored_depth)}"
        )
    shared = range(first + min(depth, stored_depth))
    prefixes = ["lm_head.", "model.embed_tokens.", "model.norm.", *(f"model.layers.{layer}." for layer in shared)]
    load_weights(model, optimizer, path, prefixes)
    for name in optimizer.states:
        if not name.startswith(tuple(prefixes)):
            set_initial(model, optimizer, name, seed)
    return lines


def _require_same(path: Path, theirs: ModelConfig, ours: ModelConfig, what: str) -> None:
    """InputError unless both are one architecture up to the MTP depth."""
    lines = differences(architecture(theirs) | {DEPTH: 0}, architecture(ours) | {DEPTH: 0})
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise InputError(
            f"{what}: another architecture than that of checkpoint.initial, {path} "
            f"({', '.join(f'model.{line}' for line in lines[:3])}{more}); leave it out, the checkpoint's is taken"
        )


def _layers(first: int, count: int) -> str:
    return ", ".join(f"model.layers.{layer}" for layer in range(first, first + count))
