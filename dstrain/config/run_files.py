"""What a run's folder keeps of its configuration, written, read back and compared.

`config.yaml` is the whole configuration, resolved; `overrides.json` what the user had asked for.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml

from dstrain.config.build import build, show
from dstrain.config.errors import InputError, first_line
from dstrain.config.overrides import Override, parse_overrides
from dstrain.config.schema import TrainConfig
from dstrain.config.validate import validate

CONFIG_FILE = "config.yaml"
OVERRIDES_FILE = "overrides.json"


def save_run_config(run_folder: Path | str, plain: dict, overrides: list[str]) -> None:
    """Write `config.yaml` and `overrides.json` into a run's folder, each complete or not at all."""
    folder = Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / CONFIG_FILE, yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))
    _write(folder / OVERRIDES_FILE, json.dumps(overrides, indent=1, ensure_ascii=False) + "\n")


def load_train_config(source: Path | str) -> TrainConfig:
    """The configuration in a `config.yaml`: a path to it, or its text (anything of more than one line)."""
    text, name = str(source), CONFIG_FILE
    if isinstance(source, Path) or "\n" not in source:
        name = str(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name}: cannot read this configuration: {error}") from None
    try:
        plain = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {first_line(error)}") from None
    try:
        return validate(build(TrainConfig, plain))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def remembered_overrides(folder: Path) -> list[Override]:
    """The overrides that the run in this folder was started with; none where there is no run."""
    path = folder / OVERRIDES_FILE
    if not path.exists():
        return []
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read how this run was started: {first_line(error)}") from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: a list of overrides is expected, as [\"model=tiny\"]")
    try:
        return parse_overrides("train", texts)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def differences(old_plain: dict, new_plain: dict) -> list[str]:
    """What changed between two plain configurations, as lines like `optim.grad_clip: 1.0 -> 0.5`."""
    old, new = flatten(old_plain), flatten(new_plain)
    keys = [*old, *(key for key in new if key not in old)]
    absent = "absent"
    return [f"{key}: {show(old[key]) if key in old else absent} -> {show(new[key]) if key in new else absent}"
            for key in keys if key not in old or key not in new or old[key] != new[key]]


def flatten(plain: Any, where: str = "") -> dict[str, Any]:
    """Dotted key -> value; an empty group or list is a value."""
    if isinstance(plain, dict | list) and plain:
        items = plain.items() if isinstance(plain, dict) else enumerate(plain)
        return {k: v for key, value in items
                for k, v in flatten(value, f"{where}.{key}" if where else str(key)).items()}
    return {where: plain}


def _write(path: Path, text: str) -> None:
    """Write a file durably and at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class _Dumper(yaml.SafeDumper):
    """Quotes text that some YAML reader would take for a number: YAML 1.1 and 1.2 disagree on 1e5."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    looks_like_number = re.fullmatch(r"[-+.\d][-+.\w:]*", text) is not None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if looks_like_number else None)


_Dumper.add_representer(str, _represent_text)
