"""The average of the weights: against float64 of its formula, over layouts and saves, and who takes it.

That an interrupted run has the average of the unbroken one is in test_resume.py, what a rollback does in test_guard.py.
"""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import make_config, run, train_model
from ranks import spawn
from recorded import Recorder, whole
from safetensors.torch import load_file
from test_layouts import config_of
from test_resume import final_tensors

from dstrain.checkpoint.store import CheckpointStore
from dstrain.checkpoint.weights import EMA
from dstrain.cli import main
from dstrain.config.schema import EmaConfig
from dstrain.inference.load import load_model
from dstrain.train import ema as module
from dstrain.train.ema import Ema
from dstrain.train.state import restore, run_tensors

DECAY = 0.7
AT_ONCE = "optim.moments=bf16", "batch.micro_sequences=8"
MODEL = train_model(num_hidden_layers=3, num_nextn_predict_layers=1)


class Averaged(Recorder):
    """A recorder with an average of decay 0.7 from the initial weights on."""

    def __init__(self, config, precision="fp64", size=1, rank=0, every=1):
        super().__init__(config, precision, size, rank)
        self.stepper.ema = Ema(self.model, self.optimizer, EmaConfig(DECAY, every))
        self.stepper.ema.start()

    def truth(self):
        """This rank's masters and biases now, in float64."""
        states = self.optimizer.states
        return {name: (states[name].master if name in states else tensor).double().clone()
                for name, tensor in self.model.state_dict().items()}

    def average(self):
        """{name: (begin in the flattened whole, values)} of this rank."""
        replicas, found = self.optimizer.replicas, {}
        for name, value in self.stepper.ema.values().items():
            state = self.optimizer.states.get(name)
            if state is None:
                found[name] = (0, value.clone())
            elif len(value):
                begin = replicas.first(name) * math.prod(state.parameter.shape[1:]) + state.first
                found[name] = (begin, value.clone())
        return found


@pytest.mark.parametrize("precision, tolerance, every", [("fp64", 1e-14, 1), ("fp32", 1e-6, 2), ("bf16", 1e-6, 1)])
def test_the_average_is_that_of_the_formula_in_float64_and_skipped_steps_are_none_of_its(
    tmp_path, precision, tolerance, every
):
    recorder = Averaged(config_of(tmp_path, *AT_ONCE, model=MODEL), precision, every=every)
    wanted, first = recorder.truth(), recorder.truth()
    for step in range(1, 8):
        if step == 3:  # whose gradients are not finite
            with torch.no_grad():
                recorder.optimizer.states["model.norm.weight"].parameter.main_grad[0] = math.nan
        ((_, metrics, *_),) = recorder.steps(1)
        assert metrics["skipped"] == (step == 3)
        if step != 3 and recorder.state.updates % every == 0:
            now = recorder.truth()
            wanted = {name: DECAY**every * wanted[name] + (1 - DECAY**every) * now[name] for name in wanted}
    assert recorder.state.updates == 6
    found, moved = recorder.stepper.ema.values(), 0
    assert found.keys() == wanted.keys() and any("e_score_correction_bias" in name for name in found)
    for name, right in wanted.items():
        limit = (max(tolerance, 1e-6) if "bias" in name else tolerance) * right.norm()  # a bias is FP32 always
        assert (found[name].double() - right).norm() <= limit, name
        far = 100 * limit
        moved += (right - recorder.truth()[name]).norm() > far and (right - first[name]).norm() > far
    assert moved > 0.9 * len(wanted)  # neither the newest weights nor the first: the comparison can tell


def test_the_thread_that_fetches_piece_by_piece_makes_the_same_average(tmp_path, monkeypatch):
    """As on CUDA, but for pinned memory and streams."""
    config = config_of(tmp_path, *AT_ONCE, model=MODEL)
    plain = Averaged(config, "bf16")
    plain.steps(4)
    monkeypatch.setattr(module, "PIECE", 1000)
    fetched = Averaged(config, "bf16")
    fetched.stepper.ema._background = True
    fetched.steps(4)
    right = plain.stepper.ema.values()
    assert max(len(value) for value in right.values()) > 5000
    for name, value in fetched.stepper.ema.values().items():
        torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-8)


def test_an_update_that_fails_in_the_thread_ends_the_step_behind_it(tmp_path):
    recorder = Averaged(config_of(tmp_path, *AT_ONCE, model=MODEL))
    recorder.stepper.ema._background = True
    recorder.stepper.ema._buffers = None
    recorder.steps(1)
    with pytest.raises(TypeError):
        recorder.steps(1)


# Layouts -----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp 4": {},
    "ep 4": {"ep": 4},
    "dualpipe pp 2, ep 2": {"pp": 2, "ep": 2, "schedule": "dualpipe"},
}


def save(recorder, root):
    store = CheckpointStore(Path(root), keep=2, ranks=recorder.layout.mesh.host_group, timeout=60)
    store.save(1, run_tensors(recorder.model, recorder.optimizer, recorder.stepper.ema), {}, {})
    assert store.wait() is None
    return store.newest()


def average_of(recorder, path):
    """What a recorder's average is once it has read the checkpoint."""
    for value in recorder.stepper.ema.values().values():
        value.fill_(-7.0)
    assert restore(recorder.model, recorder.optimizer, path, recorder.stepper.ema) == []
    return recorder.average()


def run_all(rank, size, configs, alone, root):
    """-> by layout: the average after four steps; and what it reads from `alone`, and from the layout before it."""
    found, before = {}, None
    for case, config in configs.items():
        recorder = Averaged(config, "fp64", size, rank)
        recorder.steps(4)
        own = recorder.average()
        path = save(recorder, f"{root}/{case}")
        found[case] = own, average_of(recorder, Path(alone)), average_of(recorder, before or path)
        before = path
    return found


def joined(parts_of_ranks):
    """Wholes of ranks' averages; a bias is on every rank that holds its layer, and the same there."""
    biases = {}
    for parts in parts_of_ranks:
        for name in [name for name in parts if name.endswith("e_score_correction_bias")]:
            _, value = parts.pop(name)
            assert torch.equal(biases.setdefault(name, value), value), name
    return whole(parts_of_ranks) | biases


def test_layouts_average_what_one_process_does_and_read_each_others(tmp_path):
    configs = {case: config_of(tmp_path, model=MODEL, **parallel) for case, parallel in LAYOUTS.items()}
    single = Averaged(config_of(tmp_path, model=MODEL))
    single.steps(4)
    right = joined([single.average()])
    alone = save(single, tmp_path / "alone")
    results = spawn(run_all, 4, configs, str(alone), str(tmp_path), timeout=300)
    before = None
    for case in configs:
        print(case)
        own, read_alone, read_before = (joined([result[case][kind] for result in results]) for kind in range(3))
        assert own.keys() == read_alone.keys() == read_before.keys() == right.keys()
        for name in right:
            assert (own[name] - right[name]).norm() <= 1e-9 * right[name].norm(), name
            assert torch.equal(read_alone[name], right[name]), name
            assert torch.equal(read_before[name], (before or own)[name]), name
        before = own
        path = CheckpointStore(tmp_path / case, 2).newest()
        there = joined([average_of(single, path)])
        assert all(torch.equal(there[name], own[name]) for name in own)


# Runs --------------------------------------------------------------------------------------------------------------


def test_it_begins_with_the_weights_in_mid_run_and_ends_with_a_line(tmp_path, capsys):
    def go(steps, *overrides):
        assert run(make_config(tmp_path, f"run.steps={steps}", *overrides)) == 0
        return final_tensors(make_config(tmp_path), steps), capsys.readouterr().out

    weights, out = go(3)
    assert "average" not in out and not any(name.startswith(EMA) for name in weights)
    tensors, out = go(4, "ema.decay=0.75")
    names = {name for name in tensors if name.startswith(("model.", "lm_head."))}
    assert {name.removeprefix(EMA) for name in tensors if name.startswith(EMA)} == names
    assert "ema.decay=0.75: step-00000003 holds no average of the weights, so it starts from its weights" in out
    for name in names:
        right = 0.75 * weights[name].double() + 0.25 * tensors[name].double()
        assert (tensors[EMA + name].double() - right.view(-1)).norm() <= 1e-6 * right.norm(), name
    tensors, out = go(5)
    assert "the average of the weights in step-00000004 is dropped" in out
    assert not any(name.startswith(EMA) for name in tensors)


def test_memory_on_the_cpu_counts_it(tmp_path):
    from dstrain.parallel.layout import Layout
    from dstrain.parallel.world import World
    from dstrain.precision.policy import PRECISIONS
    from dstrain.train.needs import check_memory

    config = make_config(tmp_path)
    with_average = dataclasses.replace(config, ema=EmaConfig(0.9))
    plain, more = (
        check_memory(c, Layout(c), PRECISIONS["bf16"], torch.device("cpu"), World(0, 1, 0, 1))[0]
        for c in (config, with_average)
    )
    elements = sum(numel for numel, _ in Layout(config).parameters())
    assert more - plain == 4 * elements


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an average and one without; the tensors of the former's checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_config(folder, "precision=bf16", "ema.decay=0.9")
    assert run(config) == 0 and run(make_config(folder, "run.name=without")) == 0
    return folder / "runs", final_tensors(config, 6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generate_takes_it_rounded_once(trained, precision):
    runs, tensors = trained
    loaded = load_model(str(runs / "run"), precision, torch.device("cpu"), print, "ema")
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value.reshape(-1), tensors[EMA + name].to(value.dtype)), name
        assert not torch.equal(value, tensors[name].to(value.dtype)) or "layernorm" in name, name
    assert main(["generate", f"checkpoint={runs / 'run'}", "weights=ema", "prompt=def", "max_tokens=3"]) == 0


def test_export_takes_it(trained, tmp_path):
    runs, tensors = trained
    out = tmp_path / "hf"
    assert main(["export", f"checkpoint={runs / 'run'}", f"out={out}", "dtype=fp32", "weights=ema"]) == 0
    there = {}
    for file in out.glob("*.safetensors"):
        there |= load_file(file)
    checked = 0
    for name, value in there.items():
        if ".experts." in name:
            layer, expert, kind = re.fullmatch(r"(.*mlp\.experts)\.(\d+)\.(.*)", name).groups()
            whole_one = tensors[f"{EMA}{layer}.{kind}"]
            right = whole_one[int(expert) * value.numel() : (int(expert) + 1) * value.numel()]
        elif EMA + name not in tensors:  # MTP modules' copies of embedding and head
            assert name.endswith(("embed_tokens.weight", "shared_head.head.weight")), name
            continue
        else:
            right = tensors[EMA + name]
        assert torch.equal(value.reshape(-1), right), name
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("command", ["generate prompt=a", "export out={out}"])
def test_a_checkpoint_without_it_is_refused_in_one_line(trained, tmp_path, capsys, command):
    name, key = command.format(out=tmp_path / "hf").split()
    assert main([name, f"checkpoint={trained[0] / 'without'}", key, "weights=ema"]) == 2
    captured = capsys.readouterr()
    assert "holds no average of its weights; valid: weights=final" in captured.err
    assert captured.err.count("\n") == 1 and captured.out == "" and not (tmp_path / "hf").exists()
