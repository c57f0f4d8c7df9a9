"""From a command line to a typed configuration, and from a run's folder back to how it was started.

Hydra chooses the files: one per group of `configs/`, plus a recipe. Keys are set on the result afterwards, by the
types that schema.py declares: the value of a text key is taken literally, whatever commas, quotes or braces it holds,
every other value is read by Hydra's grammar (numbers, true, null, lists, {key: value}). Nothing else of Hydra is
used: no output folders, no changed working directory, no multirun.

A run's folder keeps `config.yaml` (the whole configuration, resolved) and `overrides.json` (what the user had asked
for). `dstrain train run.name=X` applies the latter first, so that X continues as it was started.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dstrain.config import validate
from dstrain.config.build import (
    all_keys,
    allows_null,
    build,
    container_of,
    describe,
    is_text,
    key_hints,
    key_type,
    plain_of,
    show,
    unknown_key,
)
from dstrain.config.errors import InputError
from dstrain.config.schema import (
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PlanConfig,
    PrepareConfig,
    ReportConfig,
    TrainConfig,
)
from dstrain.config.validate import AnyConfig

COMMANDS = {
    "train": TrainConfig, "generate": GenerateConfig, "evaluate": EvaluateConfig, "export": ExportConfig,
    "import": ImportConfig, "plan": PlanConfig, "prepare": PrepareConfig, "report": ReportConfig,
}
OPTIONAL = ("recipe", "cluster")  # groups without a choice of their own
CONFIG_FILE = "config.yaml"
OVERRIDES_FILE = "overrides.json"
# They say which folder is meant and how far to go this time, not what the run is.
NEVER_REMEMBERED = ("run.name", "run.dir", "run.steps")

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


def compose(
    command: str, overrides: list[str], adopt: Callable[[dict, list[Override]], dict] | None = None
) -> tuple[AnyConfig, dict, list[str]]:
    """The validated configuration of `dstrain <command> <overrides>`.

    Returns the dataclass, the same as plain containers (every key, resolved), and the overrides to keep with the run:
    for `train` those that the run was started with, replaced by the new ones of the same key or group, without
    `run.name`, `run.dir` and `run.steps`. `adopt(plain, overrides)` may replace parts of `train`'s plain containers
    before they are typed and checked. Raises InputError (one line) for anything that is not valid.
    """
    asked = parse_overrides(command, overrides)
    if command != "train":
        config = _build(command, asked)
        return config, plain_of(config), [str(override) for override in asked]

    if any(o.key == "checkpoint.initial" and o.value != "null" for o in asked):
        if all(o.key != "run.name" for o in asked):  # the default would be the name of a model that is not taken
            raise InputError("checkpoint.initial starts a new run: give it a name, run.name=…")
    folder, where = _run_folder(asked)
    kept = [o for o in _merge(_remembered(folder), asked) if o.key not in NEVER_REMEMBERED]
    config = _build(command, kept + [o for o in asked if o.key == "run.steps"] + where, adopt)
    return config, plain_of(config), [str(override) for override in kept]


def values(command: str, overrides: list[str]) -> dict:
    """The keys that a command line would set, as plain containers, unchecked; "???" where a value must be given."""
    tree, texts = _tree(command, parse_overrides(command, overrides))
    return _fill(_plain(tree), texts)


def default_choices(command: str) -> dict[str, str]:
    """The choice of every group that a command takes where none is named; a group without one is left out."""
    listed = yaml.safe_load((config_folder() / f"{command}.yaml").read_text(encoding="utf-8")).get("defaults", [])
    found = {}
    for item in listed:
        if isinstance(item, dict):
            found |= {group: choice for group, choice in item.items() if choice}
        elif item in COMMANDS:  # plan's begin with train's
            found |= default_choices(item)
    return found


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
        raise InputError(f"{name}: not valid YAML: {_one_line(error)}") from None
    try:
        return validate.validate(build(TrainConfig, plain))
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def differences(old_plain: dict, new_plain: dict) -> list[str]:
    """What changed between two plain configurations, as lines like `optim.grad_clip: 1.0 -> 0.5`."""
    old, new = _flatten(old_plain), _flatten(new_plain)
    keys = [*old, *(key for key in new if key not in old)]
    absent = "absent"
    return [f"{key}: {show(old[key]) if key in old else absent} -> {show(new[key]) if key in new else absent}"
            for key in keys if key not in old or key not in new or old[key] != new[key]]


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


def _build(command: str, overrides: list[Override], adopt: Callable | None = None) -> AnyConfig:
    """Compose, set the keys, resolve, type and validate."""
    tree, texts = _tree(command, overrides)
    plain = _plain(tree)
    for key, value in _flatten(plain).items():
        if value == "???":
            raise InputError(f"{key} has no value: give {key}=…")
    plain = _fill(plain, texts)
    return validate.validate(build(COMMANDS[command], adopt(plain, overrides) if adopt else plain))


def _tree(command: str, overrides: list[Override]) -> tuple[Any, dict[str, str]]:
    """Hydra's composition with all keys set, and the texts for which it holds marks.

    A mark stands for a literal text until interpolations are resolved, so that no grammar ever reads the text and
    `run.name=${x}` means just that, while a config file's ${run.name} still finds it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    chosen = {o.key: o.value for o in overrides if o.is_group}  # the last choice of a group counts
    for group in OPTIONAL:
        if chosen.get(group) == "null":  # the default, which Hydra does not take from outside
            del chosen[group]
    folder = config_folder()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            tree = hydra_compose(command, [f"{group}={choice}" for group, choice in chosen.items()])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise InputError(f"{folder}: cannot compose {command}.yaml: {_one_line(error)}") from None

    parser = OverridesParser.create()
    texts: dict[str, str] = {}
    for override in overrides:
        if override.is_group:
            continue
        declared = key_type(COMMANDS[command], override.key)
        if is_text(declared) and not (allows_null(declared) and override.value == "null"):
            value: Any = f"text-{len(texts)}-{os.urandom(8).hex()}"
            texts[value] = override.value
        else:
            value = _value(parser, override, declared)
            # OmegaConf would replace or merge containers of different kinds in ways of its own
            container = container_of(declared)
            if container and not isinstance(value, container) and not (value is None and allows_null(declared)):
                raise InputError(f"{override.key}: {describe(declared)} expected, got {show(value)}")
        try:
            OmegaConf.update(tree, override.key, value, merge=True, force_add=True)
        except IndexError:
            raise InputError(f"{override}: the list has no such item; give the whole list as [{{…}},{{…}}]") from None
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise InputError(f"{override}: {_one_line(error)}") from None
    return tree, texts


def _value(parser: Any, override: Override, declared: Any) -> Any:
    """A value by Hydra's grammar."""
    from hydra.errors import HydraException

    try:
        parsed = parser.parse_override(f"key={override.value}")
    except HydraException as error:
        raise InputError(f"{override.key}: {describe(declared)} expected, cannot read {override.value!r} "
                         f"({_one_line(error)})") from None
    if parsed.is_sweep_override():
        raise InputError(f"{override.key}: one value expected, got the several values {override.value!r}; "
                         "a list is written [a,b]")
    return parsed.value()


def _plain(tree: Any) -> Any:
    """The plain containers of a tree, interpolations followed; "???" where a value must be given."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise InputError(f"cannot resolve the configuration: {_one_line(error)}") from None


def _fill(value: Any, texts: dict[str, str]) -> Any:
    """Plain containers with the marks replaced by their texts."""
    if isinstance(value, dict):
        return {key: _fill(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, texts) for item in value]
    if isinstance(value, str):
        return re.sub(r"text-\d+-[0-9a-f]{16}", lambda found: texts.get(found[0], found[0]), value)
    return value


def _run_folder(asked: list[Override]) -> tuple[Path, list[Override]]:
    """The folder that a train command means, and the overrides that hold its name fast.

    The name may come from a recipe or the model, so what was asked is composed on its own to find it; what the folder
    remembers must not change it again.
    """
    tree, texts = _tree("train", [o for o in asked if o.is_group or o.key.split(".")[0] in ("run", "model")])
    run = _fill(_plain(tree.run), texts)
    for key in ("dir", "name"):
        if not isinstance(run.get(key), str):
            raise InputError(f"run.{key}: text expected, got {show(run.get(key))}; write it in quotes in the YAML file")
    validate.check_run_name(run["name"])
    return Path(run["dir"]) / run["name"], [Override(f"run.{key}", run[key], False) for key in ("dir", "name")]


def _remembered(folder: Path) -> list[Override]:
    """The overrides that the run in this folder was started with; none where there is no run."""
    path = folder / OVERRIDES_FILE
    if not path.exists():
        return []
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot read how this run was started: {_one_line(error)}") from None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{path}: a list of overrides is expected, as [\"model=tiny\"]")
    try:
        return parse_overrides("train", texts)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _merge(remembered: list[Override], asked: list[Override]) -> list[Override]:
    """Both, the new ones in place of remembered ones of the same key or group, and last."""
    return [o for o in remembered if o.key not in {new.key for new in asked}] + asked


def _flatten(plain: Any, where: str = "") -> dict[str, Any]:
    """Dotted key -> value; an empty group or list is a value."""
    if isinstance(plain, dict | list) and plain:
        items = plain.items() if isinstance(plain, dict) else enumerate(plain)
        return {k: v for key, value in items
                for k, v in _flatten(value, f"{where}.{key}" if where else str(key)).items()}
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


def _one_line(error: Exception) -> str:
    """The first line of a message, which in Hydra and OmegaConf is the one that tells."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
