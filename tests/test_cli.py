"""cli.py: commands, help and exit codes (DESIGN §6: 0 done, 2 bad input in one line, 1 a failure in the run)."""

import dataclasses
import errno
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dstrain.cli import COMMANDS, main
from dstrain.config.build import all_keys, key_hints, without_none
from dstrain.config.errors import InputError
from dstrain.config.schema import (
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    PlanConfig,
    PrepareConfig,
    ReportConfig,
    TrainConfig,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def handlers(monkeypatch):
    """Stand-ins for what the commands start, which record their calls."""
    calls = []
    for module, name in (
        ("dstrain.train.main", "train"), ("dstrain.inference.main", "generate"),
        ("dstrain.checkpoint.hf_export", "export_folder"), ("dstrain.checkpoint.hf_import", "import_folder"),
    ):
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, lambda *arguments: calls.append(arguments) or 0)
        monkeypatch.setitem(sys.modules, module, stand_in)
    return calls


def failing(monkeypatch, error):
    def train(*_):
        raise error

    stand_in = types.ModuleType("dstrain.train.main")
    stand_in.train = train
    monkeypatch.setitem(sys.modules, "dstrain.train.main", stand_in)


def test_alone_lists_the_commands(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert all(name in out and command.summary in out for name, command in COMMANDS.items()) and err == ""


def test_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("dstrain: unknown command 'trian' (did you mean 'train'?)")


def test_train_gets_configuration_plain_and_overrides(handlers):
    assert main(["train", "model=small", "run.steps=10"]) == 0
    ((config, plain, kept),) = handlers
    assert isinstance(config, TrainConfig) and config.run.steps == 10
    assert plain["model"]["name"] == "small" and kept == ["model=small"]


def test_generate_gets_its_configuration(handlers):
    assert main(["generate", "checkpoint=runs/x", "prompt=def f(a, b='c'):"]) == 0
    ((config,),) = handlers
    assert isinstance(config, GenerateConfig) and config.prompt == "def f(a, b='c'):"


def test_export_and_import_get_their_configurations(handlers):
    """The key `from` is a reserved word of Python, its field is from_."""
    assert main(["export", "checkpoint=runs/x", "out=y", "dtype=fp8", "shard_size=500MB"]) == 0
    assert main(["import", "from=y", "out=z"]) == 0
    assert handlers == [(ExportConfig("runs/x", "y", "fp8", "500MB"),), (ImportConfig("y", "z"),)]


@pytest.mark.parametrize(
    "arguments",
    [["import", "out=x"], ["import", "from_=x", "out=y"], ["export", "checkpoint=x", "out=y", "dtype=int8"],
     ["train", "run.step=3"], ["train", "model=tinny"], ["train", "run.steps=0"], ["train", "data=text"], ["generate"],
     ["generate", "checkpoint=x", "max_tokens=-1"]],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_runs(arguments, handlers, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dstrain: ") and err.count("\n") == 1 and handlers == []


def test_bad_input_found_by_the_run_is_one_line_too(monkeypatch, capsys):
    failing(monkeypatch, InputError("a file named a\nb is missing"))
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "dstrain: a file named a b is missing\n"


def test_failure_in_the_run_is_exit_code_1_with_its_traceback(monkeypatch, capsys):
    failing(monkeypatch, RuntimeError("no disk space"))
    assert main(["train"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "RuntimeError: no disk space" in err


def test_full_disk_in_the_run_is_exit_code_1_with_one_line(monkeypatch, capsys):
    failing(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"))
    assert main(["train"]) == 1
    err = capsys.readouterr().err
    assert "no space left on device (runs/x/metrics.jsonl)" in err and err.count("\n") == 1


def test_interrupt_is_exit_code_130(monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["train"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "schema"),
    [("train", TrainConfig), ("generate", GenerateConfig), ("export", ExportConfig), ("import", ImportConfig),
     ("plan", PlanConfig), ("prepare", PrepareConfig), ("report", ReportConfig)],
)
def test_help_shows_every_key_with_type_and_meaning(command, schema, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    groups = {key for key, hint in key_hints(schema).items() if dataclasses.is_dataclass(without_none(hint))}
    for key in all_keys(schema):
        if key in groups:
            assert f"\n{key}:" in out
        else:
            assert f"\n  {key}=" in out
    assert "null: the schedule's tokens" in out or command != "train"


def test_help_shows_choices_and_the_values_of_those_made(capsys):
    assert main(["train", "--help", "model=small", "optim.grad_clip=0.5"]) == 0
    out = capsys.readouterr().out
    assert "moonlight_16b|small|tiny|v2_236b|v2_lite_16b|v3_671b|v3_671b_mtp4  (default tiny)" in out
    assert "recipe=deepseek_v3|quickstart|v2|v2_lite  (default none)" in out
    assert "run.name=small" in out and "optim.grad_clip=0.5  [number]" in out
    assert main(["generate", "--help"]) == 0
    assert "checkpoint=(must be given)  [text]" in capsys.readouterr().out


def test_as_a_process_and_as_a_module_from_any_folder():
    """Started as a user and as torchrun start it: the exit code arrives, a listing needs neither torch nor Hydra."""
    code = "import sys, dstrain.cli as c; c.main([]); print(sorted({'torch', 'hydra'} & set(sys.modules)))"
    listing = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert listing.stdout.endswith("[]\n")
    module = subprocess.run([sys.executable, "-m", "dstrain", "train", "run.step=1"], capture_output=True, text=True)
    assert (module.returncode, module.stderr) == (2, "dstrain: unknown key 'run.step' (did you mean 'run.steps'?)\n")


def test_reader_that_leaves_early_is_no_failure():
    code = f"{sys.executable!r} -m dstrain train --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    piped = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert "Traceback" not in piped.stderr and "Error" not in piped.stderr


@pytest.mark.parametrize("script", ["launch/setup.sh", "launch/test.sh", "launch/quickstart.sh", ".ci/run"])
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("environment, line", [
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK is not set; start the ranks with torchrun"),
    ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE=2, but LOCAL_RANK is not set; start the ranks with torchrun"),
    ({"RANK": "1"}, "RANK=1, but WORLD_SIZE is not set; start the ranks with torchrun"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment: must be a whole number; torchrun sets it"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be at least 1; start the ranks with torchrun"),
    ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
      "MASTER_PORT": "1"}, "RANK=2: must be from 0 to WORLD_SIZE - 1 = 1"),
    ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
      "MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be from 1 to 65535; torchrun sets it"),
])
def test_an_environment_that_no_launcher_makes_is_one_line(environment, line, monkeypatch, capsys):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert main(["train", "model=tiny"]) == 2
    assert capsys.readouterr().err == f"dstrain: {line}\n"
