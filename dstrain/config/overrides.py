"""The overrides of a command line, `key=value`, and what they may name: the keys of a command and the files of configs/."""

import dataclasses
import os
import re
from pathlib import Path

from dstrain.config.build import all_keys, container_of, key_hints, key_type, unknown_key
from dstrain.config.errors import InputError
from dstrain.config.schema import (
    EvaluateConfig, ExportConfig, GenerateConfig, ImportConfig, PlanConfig, PrepareConfig, ReportConfig, TrainConfig,
)

COMMANDS = {
    "train": TrainConfig, "generate": GenerateConfig, "evaluate": EvaluateConfig, "export": ExportConfig,
    "import": ImportConfig, "plan": PlanConfig, "prepare": PrepareConfig, "report": ReportConfig,
}
OPTIONAL = ("recipe", "cluster")  # groups without a choice of their own

# Paths: a shell leaves the ~ of run.dir=~/runs as it is, and a folder called "~" is a trap.
PATHS = (
    "run.dir", "data.text", "data.train", "data.heldout", "data.tokenizer", "data.cache", "checkpoint", "checkpoint.initial",
    "from", "out", "tokenizer", "phases", "data",
)


@dataclasses.dataclass(frozen=True)
class Override:
    """One `key=value` of the command line."""

    key: str  # a dotted key, or a group
    value: str  # as written
    is_group: bool

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def config_folder() -> Path:
    """The folder `configs/`, which lies beside the package."""
    folder = Path(__file__).resolve().parents[2] / "configs"
    if not (folder / "train.yaml").is_file():
        raise InputError(f"{folder}: the folder of configuration files is missing (run dstrain from its repository, "
                         "installed there with `pip install -e .`)")
    return folder


def groups(command: str = "train") -> dict[str, list[str]]:
    """The choices of every config group that a command takes."""
    own = {key for key, hint in key_hints(COMMANDS[command]).items() if container_of(hint) is dict}
    own |= {"recipe"} if own else set()
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
            for folder in sorted(config_folder().iterdir()) if folder.is_dir() and folder.name in own}


def parse_overrides(command: str, overrides: list[str]) -> list[Override]:
    """The overrides of a command, each key known and each group choice existing."""
    choices = groups(command)
    if command == "plan":
        overrides = [_pipeline_schedule(text, choices["schedule"]) for text in overrides]
    return [_parse(COMMANDS[command], choices, text) for text in overrides]


def _pipeline_schedule(text: str, choices: list[str]) -> str:
    """`schedule=dualpipe` is short for parallel.schedule=dualpipe, where no file of the group has that name."""
    key, _, value = text.partition("=")
    return f"parallel.{text}" if key == "schedule" and value not in choices and not value.startswith("{") else text


def _parse(schema: type, choices: dict[str, list[str]], text: str) -> Override:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{ascii(text)}: not valid UTF-8 text") from None
    if text.startswith("~"):
        raise InputError(f"{text!r}: a key cannot be removed; give it a value, or null where that is valid")
    if text.startswith("-"):
        raise InputError(f"unknown option {text!r}: options are written key=value, as in run.steps=10")
    # Hydra's + and ++ (add, add or change) mean nothing more than a plain override where every key is declared
    found = re.fullmatch(r"\+{0,2}([^=]*)=(.*)", text, re.DOTALL)
    if not found:
        raise InputError(f"{text!r}: key=value expected, as in run.steps=10")
    key, value = found.groups()
    if not re.fullmatch(r"\w+(\.\w+)*", key):
        raise InputError(f"{text!r}: {key!r} is not a key; keys look like run.steps")
    fields = list(key_hints(schema))
    if key in choices and not (key in fields and value.startswith("{")):  # {…} gives keys, it does not choose a file
        if value not in choices[key] and not (value == "null" and key in OPTIONAL):
            raise InputError(f"unknown choice {key}={value} (valid: {', '.join(choices[key])})")
        return Override(key, value, is_group=True)
    if key == "run" and container_of(key_hints(schema).get(key)) is dict:
        raise InputError("run: give its keys one by one, as in run.steps=10; not all of them are remembered with a run")
    if key.split(".")[0] not in fields:
        raise InputError(unknown_key(key, sorted({*fields, *choices}), all_keys(schema)))
    key_type(schema, key)
    return Override(key, os.path.expanduser(value) if key in PATHS else value, is_group=False)
