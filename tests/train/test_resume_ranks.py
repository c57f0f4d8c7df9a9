"""`dstrain train` on ranks: a run goes on in any other layout as if it had never been interrupted (FAULTS A18, C07).

The right values are those of one process that was never stopped: its losses, the samples it read, and everything in its
last checkpoint. In float64, so that a layout changes nothing but the last bits.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import make_config, metrics, train_model
from ranks import spawn
from recorded import samples_by_data_rank

from dstrain.checkpoint import load_tensors, tensor_names
from dstrain.checkpoint.store import CheckpointStore
from dstrain.data.samples import SampleStream
from dstrain.parallel.group import Group
from dstrain.parallel.world import World
from dstrain.train.main import train

STOP, END = 10, 13
DUAL = {"pp": 2, "schedule": "dualpipe"}
MODEL = train_model(num_hidden_layers=2, num_nextn_predict_layers=2)


class Joined(World):
    """The ranks of a test, which has joined them and goes on after a run."""

    def __init__(self, rank, size):
        super().__init__(rank, size, rank, size)
        self.start_group = Group(tuple(range(size)), rank, dist.new_group())

    def end(self):
        pass


def config_of(root, name, steps, start=8, **parallel):
    """gamma 0.01, documents masked; `start` sequences in each of the first five steps, then twice as many."""
    config = make_config(
        root, "precision=fp64", "optim.moments=fp32", f"batch.sequences={2 * start}", "batch.micro_sequences=1",
        f"batch.ramp={{start: {start}, until: {50 * start}, multiple: {start}}}", "data.sequence_length=12",
        "data.document_mask=true", f"run.name={name}", f"run.steps={steps}", "eval.at_end=true", "eval.every=0",
        model=MODEL,
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout=60.0, **parallel))


def run(world, config, begin=None):
    """One rank of a run, which continues a copy of `begin`. -> (data rank, the samples it read), batch by batch."""
    read, batch = [], SampleStream.batch
    if begin is not None and world.is_first:
        shutil.copytree(Path(config.run.dir) / begin, Path(config.run.dir) / config.run.name)

    def noted(stream, first, count):
        read.append(list(range(first, first + count)))
        return batch(stream, first, count)

    SampleStream.batch = noted
    try:
        assert train(config, dataclasses.asdict(config), [], world) == 0
    finally:
        SampleStream.batch = batch
    parallel = config.parallel
    return world.rank % (world.size // parallel.pp), read


def run_all(rank, size, cases):
    world, found = Joined(rank, size), {}
    for config, begin in cases:
        found[config.run.name] = run(world, config, begin)
    return found


def last(config):
    """Everything in the newest checkpoint but the generators of random numbers, one a data rank."""
    path = CheckpointStore(Path(config.run.dir) / config.run.name / "checkpoints", 2).newest()
    tensors = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in tensor_names(path).items()}
    load_tensors(path, tensors)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}


class Unbroken:
    """The single process: `alone-10` stopped after 10 steps, `alone` never."""

    def __init__(self, root, start):
        alone = World(0, 1, 0, 1)
        run(alone, config_of(root, "alone-10", STOP, start))
        self.config = config_of(root, "alone", END, start)
        _, self.samples = run(alone, self.config)
        self.rows, self.tensors = metrics(self.config), last(self.config)
        assert [row["batch_sequences"] for row in self.rows] == [start] * 5 + [2 * start] * (END - 5)

    def check(self, config, samples_of_ranks, first):
        """The rows of the whole run, the samples from step `first` on, and the last checkpoint."""
        rows = metrics(config)
        assert [row["step"] for row in rows] == list(range(1, END + 1))
        for row, right in zip(rows, self.rows):
            for key in ("loss", "loss_main", "loss_balance"):
                assert abs(row[key] - right[key]) <= 1e-12 * abs(right[key]), (row["step"], key)
            assert abs(row["grad_norm"] - right["grad_norm"]) <= 1e-9 * right["grad_norm"]
            for key in ("tokens", "samples", "lr", "batch_sequences", "moe_load", "skipped"):
                assert row[key] == right[key], (row["step"], key)
        for step, right in enumerate(self.samples[first:]):
            read = samples_by_data_rank([(data_rank, batches[step]) for data_rank, batches in samples_of_ranks])
            assert [i for data_rank in sorted(read) for i in read[data_rank]] == right
        assert all(len(batches) == END - first for _, batches in samples_of_ranks)
        tensors = last(config)
        assert tensors.keys() == self.tensors.keys()
        for name, right in self.tensors.items():
            if name.endswith("e_score_correction_bias"):
                assert torch.equal(tensors[name], right), name
            else:
                assert (tensors[name] - right).norm() <= 1e-9 * right.norm(), name


def eval_losses(config):
    path = Path(config.run.dir) / config.run.name / "eval.jsonl"
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def check_all(tmp_path, size, first_runs, continued, start=8):
    """first_runs: name -> layout of 10 steps on ranks. continued: name -> (begun by, layout or None: one process)."""
    unbroken = Unbroken(tmp_path, start)
    cases = [(config_of(tmp_path, name, STOP, start, **layout), None) for name, layout in first_runs.items()]
    cases += [(config_of(tmp_path, name, END, start, **layout), begin)
              for name, (begin, layout) in continued.items() if layout is not None]
    results = spawn(run_all, size, cases, timeout=400)
    for name, (begin, layout) in continued.items():
        print(name)
        config = config_of(tmp_path, name, END, start, **(layout or {}))
        if layout is None:
            samples = [run(World(0, 1, 0, 1), config, begin)]
        else:
            samples = [result[name] for result in results]
        unbroken.check(config, samples, STOP)
        assert eval_losses(config)[-1] == pytest.approx(eval_losses(unbroken.config)[-1], rel=1e-12)
    for name in first_runs:
        for step, right in enumerate(unbroken.samples[:STOP]):
            read = samples_by_data_rank([(data_rank, read[step]) for data_rank, read in (r[name] for r in results)])
            assert [i for data_rank in sorted(read) for i in read[data_rank]] == right


def test_a_run_goes_on_in_another_layout(tmp_path):
    check_all(
        tmp_path, 4,
        first_runs={"dp4": {}, "ep2": {"ep": 2}},
        continued={
            "ep2 to ep4": ("ep2", {"ep": 4}),
            "alone to dualpipe": ("alone-10", DUAL),
            "alone to dp4": ("alone-10", {}),
            "dp4 to alone": ("dp4", None),
            "dp4 to dualpipe, ep2": ("dp4", DUAL | {"ep": 2}),
        },
    )


@pytest.mark.long
def test_one_process_goes_on_with_what_eight_ranks_began(tmp_path):
    check_all(
        tmp_path, 8,
        first_runs={"eight": DUAL | {"ep": 2}},
        continued={"eight to alone": ("eight", None), "eight to dp8": ("eight", {})},
        start=16,
    )
