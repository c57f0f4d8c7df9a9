"""The command `dstrain`: find the command, compose its configuration, run it, turn what went wrong into an exit code.

Exit codes: 0 done; 2 bad configuration or input, one line; 1 a failure in the run, with its traceback; 130 Ctrl-C where
the command does not handle it. Nothing heavy is imported before it is needed, so that `dstrain` answers at once.
"""

import dataclasses
import faulthandler
import inspect
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable

from dstrain.config.errors import NO_ROOM, InputError, StoppedElsewhere, nearest


def _train(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    faulthandler.enable(2)  # native crashes leave the stacks of Python too
    size, rank = (os.environ.get(key) or None for key in ("WORLD_SIZE", "RANK"))
    if size is None and rank not in (None, "0"):  # the others would each train alone
        raise InputError(f"RANK={rank}, but WORLD_SIZE is not set; start the ranks with torchrun")
    if size in (None, "1"):
        composed = compose("train", overrides, _adopt)  # before the import of torch: a mistyped key is answered at once
        from dstrain.train.main import train

        return train(*composed)
    from dstrain.train.main import train

    return _over_ranks(train, overrides)


def _doctor(overrides: list[str]) -> int:
    from dstrain.train.doctor import doctor

    return _over_ranks(doctor, overrides)


def _over_ranks(function: Callable[..., int], overrides: list[str]) -> int:
    """function(the configuration, which the first rank composes for all, and the ranks)."""
    from dstrain.config.compose import compose
    from dstrain.parallel.group import CommunicationError
    from dstrain.parallel.world import World
    from dstrain.train.preflight import agree, versions

    try:
        world = World.start()
        try:
            agree(world, {"the command line": tuple(overrides), **versions()})
            return function(*world.first(lambda: compose("train", overrides, _adopt)), world)
        except (InputError, StoppedElsewhere):
            world.end()  # else gloo's threads may abort the process at its exit, with another exit code than 2
            raise
    except CommunicationError as failure:
        print(f"dstrain: rank {os.environ.get('RANK')} on {platform.node()}: {failure}", file=sys.stderr)
        return 1


def _adopt(plain: dict, overrides: list) -> dict:
    if plain["checkpoint"]["initial"] is None:
        return plain
    from dstrain.train.initial import adopt

    return adopt(plain, overrides)


def _generate(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("generate", overrides)
    from dstrain.inference.main import generate

    return generate(config)


def _evaluate(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("evaluate", overrides)
    from dstrain.train.evaluate import evaluate

    return evaluate(config)


def _export(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("export", overrides)
    from dstrain.checkpoint.hf_export import export_folder

    return export_folder(config)


def _import(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("import", overrides)
    from dstrain.checkpoint.hf_import import import_folder

    return import_folder(config)


def _prepare(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("prepare", overrides)
    from dstrain.data.prepare import prepare

    return prepare(config)


def _plan(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("plan", overrides)
    from dstrain.planner.main import plan

    return plan(config)


def _report(overrides: list[str]) -> int:
    from dstrain.config.compose import compose

    config, _, _ = compose("report", overrides)
    from dstrain.telemetry.report import report

    return report(config)


@dataclasses.dataclass(frozen=True)
class Command:
    summary: str
    example: str
    run: Callable[[list[str]], int]
    keys: str = ""  # the command whose keys it takes; its own where there is none


COMMANDS = {
    "train": Command("pretrain a model, or continue the run of that name", "model=tiny run.steps=10", _train),
    "doctor": Command("check machine, ranks and links for a run, without a step", "model=tiny", _doctor, keys="train"),
    "generate": Command("write text with a trained model", "checkpoint=runs/tiny prompt='def '", _generate),
    "evaluate": Command(
        "loss, accuracy and expert load of a trained model on a text", "checkpoint=runs/tiny data=texts.txt", _evaluate
    ),
    "export": Command("write a checkpoint as a Hugging Face folder", "checkpoint=runs/tiny out=tiny-hf", _export),
    "import": Command("make a checkpoint of a Hugging Face folder", "from=DeepSeek-V2-Lite out=v2-lite", _import),
    "prepare": Command(
        "encode a corpus into token files", "from=texts.jsonl tokenizer=tokenizer.json out=data/tokens/mine", _prepare
    ),
    "report": Command("what a run did, or several, as one HTML file", "run=runs/tiny", _report),
    "plan": Command("memory, time and price of a run on a cluster", "recipe=deepseek_v3 cluster=h800_2048", _plan),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return _main(arguments)
    except InputError as error:
        # one line, whatever a file name or a value in it holds
        print("dstrain: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except StoppedElsewhere:
        return 2
    except BrokenPipeError:
        # the reader of our output has gone (| head): no failure of ours; keep Python from complaining at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in NO_ROOM:
            traceback.print_exc()
        else:
            where = f" ({error.filename})" if error.filename else ""
            line = f"stopped: {error.strerror.lower()}{where}; make room and give the same command again"
            print(f"dstrain: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dstrain: interrupted", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *overrides = arguments
    if name not in COMMANDS:
        raise InputError(f"unknown command {name!r}{nearest(name, COMMANDS)}; `dstrain` lists the commands")
    if "-h" in overrides or "--help" in overrides:
        print(command_help(name, [text for text in overrides if text not in ("-h", "--help")]))
        return 0
    return COMMANDS[name].run(overrides)


def overview() -> str:
    """What `dstrain` alone prints."""
    lines = ["dstrain: pretraining of DeepSeek-V3-style models", "", "usage: dstrain COMMAND [key=value …]", ""]
    lines += [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "`dstrain COMMAND --help` lists the groups and keys of a command."]
    return "\n".join(lines)


def command_help(name: str, overrides: list[str]) -> str:
    """What `dstrain COMMAND --help` prints: groups with their choices; keys with value, type and meaning.

    The values are those that the other overrides of the command line lead to, so `model=small --help` shows small's.
    """
    from dstrain.config.compose import default_choices, values
    from dstrain.config.overrides import COMMANDS as SCHEMAS
    from dstrain.config.overrides import groups

    command = COMMANDS[name]
    lines = [f"dstrain {name}: {command.summary}", "", f"usage: dstrain {name} [key=value …]",
             f"example: dstrain {name} {command.example}"]
    keys = command.keys or name
    schema = SCHEMAS[keys]
    plain = values(keys, overrides)
    default = default_choices(keys)
    if default:
        lines += ["", "groups, one file of configs/ each:"]
        for group, choices in groups(keys).items():
            lines.append(f"  {group}={'|'.join(choices)}  (default {default.get(group, 'none')})")
    lines += ["", "keys, their values here, and what they take:"]
    return "\n".join(lines + _key_lines(schema, plain, ""))


def _key_lines(schema: type, plain: dict, where: str) -> list[str]:
    """A line for every key of a dataclass whose own key is `where`; plain: the values there, where there are any."""
    from dstrain.config.build import describe, key_hints, key_of, without_none

    hints, meanings = key_hints(schema), _meanings(schema)
    lines = []
    for field in dataclasses.fields(schema):
        name = key_of(field)
        key, kind = f"{where}.{name}" if where else name, without_none(hints[name])
        is_group = dataclasses.is_dataclass(kind)
        if is_group and not where:
            lines += ["", f"{key}: {kind.__doc__.splitlines()[0]}" if _has_words(kind) else f"{key}:"]
        else:
            value = plain[name] if name in plain else _default(field)
            meaning = f"  {meanings[field.name]}" if field.name in meanings else ""
            lines.append(f"  {key}={_literal(value)}  [{describe(hints[name])}]{meaning}")
        if is_group:
            lines += _key_lines(kind, plain.get(name) or {}, key)
    return lines


def _default(field: dataclasses.Field) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "???" if field.default is dataclasses.MISSING else field.default


def _has_words(schema: type) -> bool:
    """Whether a dataclass has a docstring of its own; Python writes its signature where there is none."""
    return not schema.__doc__.startswith(f"{schema.__name__}(")


def _literal(value: object) -> str:
    """A value as it would be written on the command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    if isinstance(value, str):
        return "(must be given)" if value == "???" else value
    return json.dumps(value)


def _meanings(schema: type) -> dict[str, str]:
    """The comment behind each field in the schema's source, which is the one description of a key."""
    sources = [inspect.getsource(cls) for cls in reversed(schema.__mro__) if dataclasses.is_dataclass(cls)]
    return dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", "\n".join(sources), re.MULTILINE))
