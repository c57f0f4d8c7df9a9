"""Bad input to `dstrain train` over two ranks: one line from one of them, exit code 2 from both, nothing written."""

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch.distributed as dist
from helpers import write_text
from ranks import free_ports, spawn

from dstrain.cli import main
from dstrain.config.errors import InputError, StoppedElsewhere
from dstrain.parallel.group import Group
from dstrain.parallel.world import World

# what is given -> the line, with the numbers that are valid
CASES = {
    "parallel.pp=3": "parallel.pp=3 times parallel.ep=1 is 3, which does not divide the world size of 2",
    "parallel.ep=2 model.n_routed_experts=15 model.n_group=1 model.topk_group=1": "must be divisible by parallel.ep=2",
    "parallel.pp=2 parallel.stages=[1,2]": "that sum to 7",
    "parallel.pp=2 batch.sequences=5 parallel.schedule=dualpipe": "nearest valid: 4 or 6",
    "parallel.pp=2 batch.ramp={start:2,multiple:2,until:100} parallel.schedule=dualpipe": "batch.ramp.start=2",
    "batch.sequences=1": "batch.sequences=1: must be a multiple of 2",
    "parallel.ep=2 parallel.dispatch=fp8": "parallel.dispatch=fp8 with precision.name=fp32",
    "precision=fp8 precision.backend=triton": "precision.backend=triton needs an NVIDIA Hopper GPU",
    "data.sequence_length=1024": "give more text or a shorter sequence",
}
MODEL = """model=tiny model.hidden_size=32 model.intermediate_size=32 model.moe_intermediate_size=16 model.vocab_size=320
    model.q_lora_rank=16 model.kv_lora_rank=16"""


def command(folder: Path, name: str, keys: str) -> list[str]:
    """`dstrain train` of a very small run in `folder`."""
    return f"""train {MODEL} data.text={folder}/text.txt data.cache={folder}/cache data.vocab_size=300
        data.sequence_length=16 batch.sequences=8 batch.micro_sequences=1 precision=fp32 run.dir={folder}/runs
        run.name={name} run.steps=2 run.threads=1 run.device=cpu eval.every=0 eval.at_end=false checkpoint.every=0
        parallel.timeout=60 telemetry.peak_tflops=1.0 {keys}""".split()


def run_commands(rank: int, size: int, ports: list[int], commands: list[list[str]]) -> list[tuple[int, str]]:
    """The exit code and the standard error of every command line, as one rank of `size`."""
    dist.barrier()  # else one leaves the group that the other is still joining
    dist.destroy_process_group()
    results = []
    for port, arguments in zip(ports, commands):
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
            code = main(arguments)
        results.append((code, errors.getvalue()))
        if dist.is_initialized():
            dist.destroy_process_group()
    return results


def test_what_no_rank_can_run_is_one_line_in_all(tmp_path):
    write_text(tmp_path / "text.txt", lines=40)
    other = write_text(tmp_path / "other.txt", lines=40, seed=1)
    commands = [command(tmp_path, "good", keys) for keys in ("", "model.hidden_size=48", f"data.text={other}")]
    commands += [command(tmp_path, f"bad-{i}", keys) for i, keys in enumerate(CASES)]
    first, second = spawn(run_commands, 2, free_ports(len(commands)), commands, timeout=300)
    assert first[0][0] == second[0][0] == 0, first[0][1] + second[0][1]
    lines = ["is of another model (model.hidden_size: 32 -> 48)", "was trained on other data", *CASES.values()]
    for line, (code, said), (code_2, said_2) in zip(lines, first[1:], second[1:], strict=True):
        assert (code, code_2) == (2, 2), (line, said, said_2)
        text = "".join(part for part in (said + said_2).splitlines(keepends=True) if part.startswith("dstrain: "))
        assert text.count("\n") == 1 and line in text and said_2 == "", (line, said, said_2)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["good"]


def two_worlds(rank: int, size: int):
    world = World(rank, size, rank, size)
    world.start_group = Group(tuple(range(size)), rank, dist.new_group(backend="gloo"))

    def fails(ranks, text):
        if rank in ranks:
            raise InputError(text)
        return rank

    found = []
    for ranks, text in (((0, 1, 2), "no room"), ((1, 2), "no room"), ((0, 1, 2), f"no room on {rank}")):
        try:
            world.all(lambda: fails(ranks, text))
        except (InputError, StoppedElsewhere) as error:
            found.append(str(error))
    return found, world.all(lambda: fails((), ""))


def test_one_rank_speaks_and_names_itself_where_the_others_do_not_say_the_same():
    silent = ["", "", ""]
    assert spawn(two_worlds, 3) == [
        (["no room", "", "rank 0: no room on 0"], 0), (["", "rank 1: no room", ""], 1), (silent, 2)
    ]
