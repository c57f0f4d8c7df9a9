"""Every launcher: two of them are two nodes of two ranks, and the job's losses are those of one process in FP64."""

import dataclasses
import importlib.util
import os
import signal
import sys

import pytest
from helpers import make_config, metrics, status, train_model
from launched import ROOT, Job, environment, overrides, two_nodes
from ranks import free_ports

STEPS = 12
SRUN = """#!{python}
# Stands for Slurm's srun on two nodes of two tasks: starts the tasks, and ends with the highest exit code.
import os, subprocess, sys
if os.environ.get("ENDS_WITH"):
    sys.exit(int(os.environ["ENDS_WITH"]))
assert sys.argv[1] == "--kill-on-bad-exit=1"
tasks = [subprocess.Popen(sys.argv[2:], env={{**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % 2)}})
         for task in range(int(os.environ["SLURM_NTASKS"]))]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
[ "$1" = show ] && echo localhost || echo "$@" >> {folder}/scontrol.txt
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with text, and the run of one process in it: pipeline of 2, experts over 2 for the others."""
    folder = tmp_path_factory.mktemp("launch")
    return folder, config_of(folder, "alone")


def config_of(folder, name, *more, **parallel):
    config = make_config(
        folder, "precision=fp64", "batch.sequences=8", "batch.micro_sequences=1", f"run.steps={STEPS}",
        f"run.name={name}", *more, model=train_model(num_nextn_predict_layers=1, mtp_depth_weights=None),
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout=60.0, **parallel))


@pytest.fixture(scope="module")
def reference(small):
    folder, config = small
    with Job(folder, [([sys.executable, "-m", "dstrain", "train", *overrides(config)], environment())]) as job:
        assert job.wait() == [0], job.text()
    return metrics(config)


def same_losses(config, reference):
    rows = metrics(config)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, expected in zip(rows, reference):
        for key in ("loss", "loss_main", "loss_balance", "grad_norm"):
            assert abs(row[key] - expected[key]) <= 1e-12 * abs(expected[key]), (key, row["step"])
        assert row["moe_load"] == expected["moe_load"] and row["tokens"] == expected["tokens"]
    assert status(config)["status"] == "finished"


def bash(script, config, **variables):
    return ["bash", str(ROOT / "launch" / script), *overrides(config)], environment(**variables)


def on_nodes(nodes, commands):
    """The commands, each on its node, and there on its network."""
    return [([*node.enter, *command], given | node.variables) for node, (command, given) in zip(nodes, commands)]


def test_torchrun(small, reference):
    config = config_of(small[0], "torchrun", pp=2, ep=2)
    with two_nodes(small[0]) as nodes:
        more = {"NNODES": 2, "NPROC": 2, "MASTER_ADDR": nodes[0].name, "MASTER_PORT": free_ports(1)[0], "JOB": "test"}
        with Job(small[0], on_nodes(nodes, [bash("torchrun.sh", config, **more) for _ in range(2)])) as job:
            assert job.wait() == [0, 0], job.text()
        assert f"4 ranks on {len({node.name for node in nodes})} hosts" in job.text()
    same_losses(config, reference)
    assert job.text().count(f"done: {STEPS} steps") == 1  # one console


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (launch/setup.sh deepspeed)"
)
def test_deepspeed(small, reference):
    config = config_of(small[0], "deepspeed", pp=2, ep=2)
    hosts = small[0] / "hosts"
    hosts.write_text("node0 slots=2\nnode1 slots=2\n")
    with two_nodes(small[0]) as nodes:
        more = {"HOSTFILE": hosts, "MASTER_ADDR": nodes[0].name, "MASTER_PORT": free_ports(1)[0], "DS_ACCELERATOR": "cpu"}

        def started(config):
            return on_nodes(nodes, [bash("deepspeed.sh", config, NODE_RANK=node, **more) for node in range(2)])

        with Job(small[0], started(config)) as job:
            assert job.wait() == [0, 0], job.text()
        same_losses(config, reference)
        assert job.text().count(f"done: {STEPS} steps") == 1
        assert f"4 ranks on {len({node.name for node in nodes})} hosts" in job.text()
        with Job(small[0], started(config_of(small[0], "deepspeed", pp=3))) as job:
            assert job.wait() == [2, 2], job.text()  # the ranks' own exit code


@pytest.mark.long
def test_slurm_queues_the_job_again_after_a_signal(small, reference):
    """SIGUSR1 reaches one rank alone; all stop after the same step, and the job that is queued again ends the run."""
    folder, config = small[0], config_of(small[0], "slurm", pp=2, ep=2)
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text.format(python=sys.executable, folder=folder))
        (folder / "bin" / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": free_ports(1)[0], "SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2, "SLURM_JOB_NODELIST": "x[1-2]"}
    more = {**slurm, "MASTER_PORT": free_ports(1)[0], "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "DSTRAIN_ROOT": ROOT}
    lines = folder / "runs/slurm/metrics.jsonl"
    with Job(folder, [bash("slurm.sbatch", config, **more)]) as job:
        job.wait_for(lambda: lines.exists() and lines.stat().st_size, "the first step")
        os.kill(job.rank(3), signal.SIGUSR1)
        assert job.wait() == [0], job.text()
    stopped = status(config)
    assert (stopped["status"], stopped["signal"]) == ("interrupted", "SIGUSR1") and stopped["step"] < STEPS
    assert (folder / "scontrol.txt").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    with Job(folder, [bash("slurm.sbatch", config, **more, SLURM_RESTART_COUNT=1)]) as job:
        assert job.wait() == [0], job.text()
    same_losses(config, reference)
    assert f"continuing from {folder}/runs/slurm/checkpoints/step-{stopped['step']:08}" in job.text()
    assert (folder / "scontrol.txt").read_text().count("\n") == 1
    for code, restarts, again in ((2, 0, 0), (0, 0, 0), (1, 0, 1), (137, 9, 1), (1, 10, 0)):  # a finished run's status
        (folder / "scontrol.txt").write_text("")
        variables = {**more, "ENDS_WITH": code, "SLURM_RESTART_COUNT": restarts}
        with Job(folder, [bash("slurm.sbatch", config, **variables)]) as job:
            assert job.wait() == [code], job.text()
        assert (folder / "scontrol.txt").read_text().count("\n") == again, (code, restarts)
