"""compose.py: what a command line means, and how a run remembers it."""

import dataclasses
import json
import os

import pytest
import yaml

from dstrain.config import compose as compose_module
from dstrain.config import overrides as overrides_module
from dstrain.config.compose import compose, default_choices
from dstrain.config.errors import InputError
from dstrain.config.overrides import groups
from dstrain.config.run_files import differences, load_train_config, save_run_config


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Runs are looked for below the working directory."""
    monkeypatch.chdir(tmp_path)


def train(*overrides):
    return compose("train", list(overrides))[0]


def refusal(command, *overrides) -> str:
    with pytest.raises(InputError) as caught:
        compose(command, list(overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_hardly_anything_is_a_complete_command():
    config = train()
    assert config.model.name == config.run.name == "tiny"
    assert train("model=small", "run.steps=10").run.steps == 10
    assert train("model=small").run.name == "small"


def test_plain_holds_every_key_of_the_dataclass():
    config, plain, _ = compose("train", ["batch.sequences=16"])
    assert plain == dataclasses.asdict(config)


def test_composing_leaves_nothing_behind(tmp_path):
    train("model=tiny")
    assert os.listdir(tmp_path) == [] and os.getcwd() == str(tmp_path)


# FAULTS D07: the same number in every spelling, and an id that only looks like one
@pytest.mark.parametrize(("text", "right"), [("1e-4", 1e-4), ("3e4", 3e4), ('"1e-4"', 1e-4), ("2", 2.0)])
def test_override_of_a_float_key_is_a_float(text, right):
    value = train(f"optim.grad_clip={text}").optim.grad_clip
    assert value == right and type(value) is float


@pytest.mark.parametrize("text", ["1e5", "007", "1E234", "true", "null", "0x10", "1_0", "[a]", '"q"', "${model.name}"])
def test_text_of_a_text_key_stays_as_written(text):
    assert train(f"run.name={text}").run.name == text


@pytest.mark.parametrize(
    "text",
    ["def f(x, y=3):", "a,b", "it's \"quoted\"", "{a: 1}", "[1, 2", "${x}", "\\${x}", "???", "a=b=c", " lead", "x\ny",
     "", "\\", "text-0-0123456789abcdef", "ü€😀", "# no comment", "~x", "-x"],
)
def test_prompt_arrives_literally(text):
    assert compose("generate", ["checkpoint=runs/x", f"prompt={text}"])[0].prompt == text


def test_home_is_found_in_every_path_and_a_prompt_keeps_its_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config, _, kept = compose("train", ["run.dir=~/runs", "data.cache=~/cache", "run.name=~x"])
    assert (config.run.dir, config.data.cache, config.run.name) == ("/home/someone/runs", "/home/someone/cache", "~x")
    assert kept == ["data.cache=/home/someone/cache"]
    config, _, _ = compose("generate", ["checkpoint=~/runs/x", "prompt=~/y"])
    assert (config.checkpoint, config.prompt) == ("/home/someone/runs/x", "~/y")


def test_null_unsets_a_key_that_can_be_unset():
    assert compose("generate", ["checkpoint=x", "prompt=null", "top_k=null"])[0].prompt is None
    assert train("run.steps=null").run.steps is None
    assert train("batch.ramp=null", "data.tokenizer=null").data.tokenizer is None


def test_interpolation_in_a_file_sees_a_literal_override():
    """run.name is ${model.name} in train.yaml."""
    assert train("model.name=a,${b}'").run.name == "a,${b}'"


def test_lists_of_segments_by_item_and_as_a_whole():
    rates = train("schedule.learning_rate.0.value=5e-5", "schedule.learning_rate.0.until=1%").schedule.learning_rate
    assert (rates[0].value, rates[0].until, rates[0].shape) == (5e-5, "1%", "linear")
    whole = "schedule.learning_rate=[{until:2%,value:1e-3,shape:linear},{until:1e7,value:1}]"
    rates = train(whole).schedule.learning_rate
    assert [(r.until, r.value, r.shape) for r in rates] == [("2%", 1e-3, "linear"), (1e7, 1.0, "constant")]


def test_absent_groups_by_one_key_or_as_a_whole():
    yarn = train("model.rope_scaling={factor:4,original_max_position_embeddings:1024}").model.rope_scaling
    assert (yarn.factor, yarn.beta_fast) == (4.0, 32.0)
    ramp = train("batch.ramp.start=8", "batch.ramp.until=1e5", "batch.ramp.multiple=8").batch.ramp
    assert (ramp.start, ramp.until) == (8, 1e5)


def test_plus_signs_of_hydra_change_nothing():
    assert train("+run.steps=3").run.steps == train("++run.steps=3").run.steps == 3


def test_later_override_counts():
    config = train("model=tiny", "run.steps=1", "model=small", "run.steps=2")
    assert (config.model.name, config.run.steps) == ("small", 2)
    assert train("recipe=deepseek_v3", "recipe=null").model.name == "tiny"


def test_command_line_beats_recipe_and_recipe_beats_the_rest():
    recipe = train("recipe=deepseek_v3")
    assert (recipe.model.name, recipe.data.sequence_length, recipe.batch.sequences) == ("v3_671b", 4096, 15360)
    config = train("recipe=deepseek_v3", "model=v3_671b_mtp4", "batch.sequences=30720")
    assert (config.model.name, config.batch.sequences) == ("v3_671b_mtp4", 30720)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["run.step=3"], "unknown key 'run.step' (did you mean 'run.steps'?)"),
        (["steps=3"], "unknown key 'steps' (did you mean 'run.steps'?)"),
        (["modle=small"], "unknown key 'modle' (did you mean 'model'?)"),
        (["model.hiden_size=3"], "unknown key 'model.hiden_size' (did you mean 'model.hidden_size'?)"),
        (["model=smal"], "unknown choice model=smal (valid:"),
        (["optim=sgd"], "unknown choice optim=sgd (valid: adamw)"),
        (["model=null"], "unknown choice model=null (valid:"),
        (["recipe=quick"], "unknown choice recipe=quick (valid: deepseek_v3, quickstart, v2, v2_lite)"),
        (["hydra.run.dir=x"], "unknown key 'hydra.run.dir'"),
        (["run.steps=1,2"], "run.steps: one value expected, got the several values '1,2'"),
        (["run.steps=ten"], "run.steps: integer or null expected, got 'ten'"),
        (["run.steps=1.5"], "run.steps: integer or null expected, got 1.5"),
        (["run.steps="], "run.steps: integer or null expected, got ''"),
        (["optim.grad_clip=[1"], "optim.grad_clip: number expected, cannot read '[1'"),
        (["optim.grad_clip=true"], "optim.grad_clip: number expected, got true"),
        (["schedule.tokens=${run.sed}"], "Interpolation key 'run.sed' not found"),
        (["schedule.learning_rate.9.value=1"], "the list has no such item"),
        (["schedule.learning_rate={a:1}"], "schedule.learning_rate: list of {until, value, shape} expected"),
        (["batch=5"], "batch: {sequences, micro_sequences, ramp} expected, got 5"),
        (["run={steps:5}"], "run: give its keys one by one"),
        (["batch.ramp.start=8"], "missing key 'batch.ramp.until'"),
        (["data={text: 3}"], "data.text: text expected, got 3"),
        (["foo"], "'foo': key=value expected"),
        (["=3"], "'' is not a key"),
        (["~run.steps"], "a key cannot be removed"),
        (["--multirun"], "unknown option '--multirun'"),
        (["data=text"], "data.text has no value: give data.text="),
        (["data=files"], "data.train has no value: give data.train="),
        (["run.name=a/b"], "run.name: 'a/b' cannot name a folder"),
        (["run.name=\udcff"], "not valid UTF-8"),
        (["data.sequence_length=5000"], "data.sequence_length=5000: must be at most"),
    ],
)
def test_bad_command_line_of_train_is_one_line(overrides, line):
    assert line in refusal("train", *overrides)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["prompt=a"], "checkpoint has no value: give checkpoint="),
        (["checkpoint=x", "max_tokens=0"], "max_tokens=0: must be at least 1"),
        (["checkpoint=x", "temprature=0"], "unknown key 'temprature' (did you mean 'temperature'?)"),
        (["checkpoint=x", "model=tiny"], "unknown key 'model' (valid: checkpoint,"),
    ],
)
def test_bad_command_line_of_generate_is_one_line(overrides, line):
    assert line in refusal("generate", *overrides)


def test_number_where_a_yaml_file_means_text_is_refused(tmp_path, monkeypatch):
    folder = copied_configs(tmp_path, monkeypatch)
    (folder / "model" / "mine.yaml").write_text("defaults: [tiny, _self_]\nname: 1e5\n")
    line = refusal("train", "model=mine", "run.name=x")
    assert line.startswith("model.name: text expected, got 100000.0; write it in quotes")
    (folder / "recipe" / "mine.yaml").write_text("# @package _global_\nrun:\n  name: 1e5\n")
    assert "run.name: text expected, got 100000.0" in refusal("train", "recipe=mine")
    (folder / "optim" / "mine.yaml").write_text('defaults: [adamw, _self_]\ngrad_clip: 1e-4\nbeta1: "1e-1"\neps: 3e4\n')
    optim = train("optim=mine").optim
    assert (optim.grad_clip, optim.beta1, optim.eps) == (1e-4, 0.1, 3e4)


def test_unknown_key_and_broken_yaml_in_a_file_are_one_line(tmp_path, monkeypatch):
    folder = copied_configs(tmp_path, monkeypatch)
    (folder / "optim" / "mine.yaml").write_text("defaults: [adamw, _self_]\ngrad_clp: 1\n")
    assert refusal("train", "optim=mine") == "unknown key 'optim.grad_clp' (did you mean 'optim.grad_clip'?)"
    (folder / "optim" / "mine.yaml").write_text("grad_clip: [1\n")
    assert "cannot compose train.yaml" in refusal("train", "optim=mine")


def copied_configs(tmp_path, monkeypatch):
    import shutil

    folder = tmp_path / "configs"
    shutil.copytree(overrides_module.config_folder(), folder)
    for module in (compose_module, overrides_module):
        monkeypatch.setattr(module, "config_folder", lambda: folder)
    return folder


def test_missing_folder_of_configurations_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(overrides_module, "__file__", str(tmp_path / "a" / "b" / "overrides.py"))
    assert "configs: the folder of configuration files is missing" in refusal("train")


# --- a run's folder


def started(*overrides):
    """As the trainer does it: compose, and save beside the run."""
    config, plain, kept = compose("train", list(overrides))
    save_run_config(f"{config.run.dir}/{config.run.name}", plain, kept)
    return config, kept


def test_run_continues_as_it_was_started():
    first, _ = started("model=small", "run.name=X", "optim.grad_clip=0.5", "run.steps=10", "data.text=a,b")
    again = train("run.name=X")
    assert (again.model.name, again.optim.grad_clip, again.data.text) == ("small", 0.5, "a,b")
    assert again.run.steps is None  # how far to go is asked anew each time
    assert dataclasses.replace(first.run, steps=None) == again.run


def test_new_overrides_replace_remembered_ones_of_the_same_key_or_group():
    started("model=small", "run.name=X", "optim.grad_clip=0.5", "batch.sequences=16")
    config, _, kept = compose("train", ["run.name=X", "model=tiny", "optim.grad_clip=0.7"])
    assert (config.model.name, config.optim.grad_clip, config.batch.sequences) == ("tiny", 0.7, 16)
    assert kept == ["batch.sequences=16", "model=tiny", "optim.grad_clip=0.7"]


def test_name_folder_and_steps_are_never_remembered():
    _, kept = started("run.name=X", "run.dir=here", "run.steps=5", "run.seed=3")
    assert kept == ["run.seed=3"]
    assert not os.path.exists("runs") and train("run.name=X").run.seed != 3
    assert train("run.name=X", "run.dir=here").run.seed == 3


def test_remembered_choices_cannot_move_the_run():
    """runs/tiny remembers model=small; its name still is tiny, though the default would now say small."""
    started("model=small", "run.name=tiny")
    config = train()
    assert (config.run.name, config.model.name) == ("tiny", "small")


def test_name_from_the_model_finds_its_folder():
    started("model=small", "optim.grad_clip=0.5")
    assert train("model=small").optim.grad_clip == 0.5
    assert train("model=tiny").optim.grad_clip != 0.5


def test_item_of_a_remembered_schedule_can_be_changed():
    started("run.name=X", "schedule.learning_rate=[" + ",".join(f"{{until:{i}e5,value:1}}" for i in range(1, 9)) + "]")
    rates = train("run.name=X", "schedule.learning_rate.7.value=0.5").schedule.learning_rate
    assert [rate.value for rate in rates] == [1.0] * 7 + [0.5]


@pytest.mark.parametrize(
    ("text", "line"),
    [("{", "cannot read"), ('{"a": 1}', "a list of overrides"), ("[1]", "a list of overrides"),
     ('["run.step=1"]', "unknown key 'run.step'")],
)
def test_damaged_memory_names_its_file(text, line):
    os.makedirs("runs/X")
    with open("runs/X/overrides.json", "w") as file:
        file.write(text)
    message = refusal("train", "run.name=X")
    assert message.startswith("runs/X/overrides.json") and line in message


@pytest.mark.parametrize(
    "name", ["1e5", "007", "0x1F", "1:30", "true", "null", "~", "2024-01-01", "a: b # c", "${x}", "-1"]
)
def test_saved_configuration_reads_back_equal(name):
    config, plain, kept = compose("train", [f"run.name={name}", "model=v3_671b", "optim.eps=1e-20", "data.text=1_0"])
    save_run_config("folder", plain, kept)
    assert load_train_config("folder/config.yaml") == config
    with open("folder/config.yaml") as file:
        text = file.read()
    assert load_train_config(text) == config
    assert json.load(open("folder/overrides.json")) == kept
    assert sorted(os.listdir("folder")) == ["config.yaml", "overrides.json"]
    # other readers, YAML 1.2 among them, must not take a name for a number either
    assert f'name: "{name}"' in text or f"name: '{name}'" in text or not name[0].isdigit()


def test_interrupted_write_leaves_the_old_configuration(monkeypatch):
    config, plain, kept = compose("train", [])
    save_run_config("folder", plain, kept)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_run_config("folder", {"broken": 1}, [])
    assert load_train_config("folder/config.yaml") == config


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda plain: plain["optim"].update(grad_clip="x"), "optim.grad_clip: number expected"),
        (lambda plain: plain["model"].pop("hidden_size"), "missing key 'model.hidden_size'"),
        (lambda plain: plain["model"].update(qk_rope_head_dim=7), "model.qk_rope_head_dim=7"),
        (lambda plain: plain.clear(), "missing key 'run'"),
    ],
)
def test_edited_configuration_is_checked_on_reading(edit, line):
    plain = compose("train", [])[1]
    edit(plain)
    with open("config.yaml", "w") as file:
        yaml.safe_dump(plain, file)
    with pytest.raises(InputError) as caught:
        load_train_config("config.yaml")
    assert str(caught.value).startswith("config.yaml: ") and line in str(caught.value)


def test_unreadable_configuration_is_named():
    bad = {b"a: [1": "not valid YAML", b"\xff\xfe\xff": "cannot read", b"a list": "a group of keys"}
    for content, line in bad.items():
        with open("c.yaml", "wb") as file:
            file.write(content)
        with pytest.raises(InputError, match=f"c.yaml: .*{line}"):
            load_train_config("c.yaml")
    with pytest.raises(InputError, match="none.yaml: cannot read"):
        load_train_config("none.yaml")


def test_differences_name_key_old_and_new():
    old = compose("train", [])[1]
    new = compose("train", ["optim.grad_clip=0.5", "batch.ramp={start:8,until:1e6,multiple:8}", "data.text=x"])[1]
    assert differences(old, old) == []
    assert differences(old, new) == [
        "data.text: null -> 'x'",
        "batch.ramp: null -> absent",
        "optim.grad_clip: 1.0 -> 0.5",
        "batch.ramp.start: absent -> 8",
        "batch.ramp.until: absent -> 1000000.0",
        "batch.ramp.multiple: absent -> 8",
    ]


def test_groups_and_their_defaults_are_those_of_the_folder():
    assert sorted(groups()) == ["checkpoint", "data", "model", "optim", "parallel", "precision", "recipe", "schedule",
                                "telemetry"]
    assert groups()["precision"] == ["auto", "bf16", "fp32", "fp64", "fp8"]
    choices = default_choices("train")
    assert choices["model"] == "tiny" and "recipe" not in choices and default_choices("generate") == {}
