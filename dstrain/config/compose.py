"""From a command line to a typed configuration.

Hydra chooses the files: one per group of `configs/`, plus a recipe. Keys are set on the result afterwards, by the
types that schema.py declares: the value of a text key is taken literally, whatever commas, quotes or braces it holds,
every other value is read by Hydra's grammar (numbers, true, null, lists, {key: value}). Nothing else of Hydra is
used: no output folders, no changed working directory, no multirun.

`dstrain train run.name=X` applies the overrides that X's folder remembers first, so that X continues as it was started.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dstrain.config.build import allows_null, build, container_of, describe, is_text, key_type, plain_of, show
from dstrain.config.errors import InputError, first_line
from dstrain.config.overrides import COMMANDS, OPTIONAL, Override, config_folder, parse_overrides
from dstrain.config.run_files import flatten, remembered_overrides
from dstrain.config.validate import AnyConfig, check_run_name, validate

# They say which folder is meant and how far to go this time, not what the run is.
NEVER_REMEMBERED = ("run.name", "run.dir", "run.steps")


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
    kept = [o for o in _merge(remembered_overrides(folder), asked) if o.key not in NEVER_REMEMBERED]
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


def _build(command: str, overrides: list[Override], adopt: Callable | None = None) -> AnyConfig:
    """Compose, set the keys, resolve, type and validate."""
    tree, texts = _tree(command, overrides)
    plain = _plain(tree)
    for key, value in flatten(plain).items():
        if value == "???":
            raise InputError(f"{key} has no value: give {key}=…")
    plain = _fill(plain, texts)
    return validate(build(COMMANDS[command], adopt(plain, overrides) if adopt else plain))


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
        raise InputError(f"{folder}: cannot compose {command}.yaml: {first_line(error)}") from None

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
            raise InputError(f"{override}: {first_line(error)}") from None
    return tree, texts


def _value(parser: Any, override: Override, declared: Any) -> Any:
    """A value by Hydra's grammar."""
    from hydra.errors import HydraException

    try:
        parsed = parser.parse_override(f"key={override.value}")
    except HydraException as error:
        raise InputError(f"{override.key}: {describe(declared)} expected, cannot read {override.value!r} "
                         f"({first_line(error)})") from None
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
        raise InputError(f"cannot resolve the configuration: {first_line(error)}") from None


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
    check_run_name(run["name"])
    return Path(run["dir"]) / run["name"], [Override(f"run.{key}", run[key], False) for key in ("dir", "name")]


def _merge(remembered: list[Override], asked: list[Override]) -> list[Override]:
    """Both, the new ones in place of remembered ones of the same key or group, and last."""
    return [o for o in remembered if o.key not in {new.key for new in asked}] + asked
