"""Saving and restoring a run beside the disk's own rate: how long training stands still, when the save is durable.

    python tools/bench_checkpoint.py                                     # small: 60M parameters
    python tools/bench_checkpoint.py model=bench_81m model.n_routed_experts=80 folder=/mnt/disk out=checkpoint.md

Keys with a dot are overrides of `dstrain train`. A round is, one after the other on the same disk:

    disk     the same number of bytes written by one plain sequential loop into one file and forced to the disk, and
             read again after the page cache has let go of them
    save     while nothing else runs: how long `save` keeps its caller, and until the checkpoint is durable
    behind   a save with steps going on: how much longer these take than the steps before it, until it is durable
    restore  of a checkpoint that the page cache has let go of: the check of all its bytes, and the loading

Medians over rounds; the first save, which has to get its memory, is told apart. The last line is JSON.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench_step import ALLOCATOR, cpu_name

DEFAULTS = {
    "model": "small", "precision": "bf16", "sequence": "512", "batch": "4", "steps": "3", "rounds": "5", "threads": "2",
    "folder": "", "out": "",
}
BLOCK = 1 << 22  # bytes of one plain write


def main() -> None:
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    overrides = [f"{key}={value}" for key, value in arguments.items() if "." in key]
    options = DEFAULTS | {key: value for key, value in arguments.items() if "." not in key}
    if unknown := set(options) - set(DEFAULTS):
        sys.exit(f"unknown option {unknown.pop()!r}; valid: {', '.join(DEFAULTS)}, and overrides with a dot")
    wanted = ALLOCATOR | {"OMP_NUM_THREADS": options["threads"]}
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)  # malloc reads them when it starts
    with tempfile.TemporaryDirectory(dir=options["folder"] or None, prefix="bench-checkpoint-") as folder:
        bench = Bench(options, overrides, Path(folder))
        first = bench.save()
        rounds = []
        for number in range(int(options["rounds"])):
            rounds.append(bench.disk() | bench.save() | bench.behind() | bench.restore())
            print(f"round {number + 1}: " + "  ".join(f"{key} {value:.3f}" for key, value in rounds[-1].items()),
                  file=sys.stderr)
    summary = summarise(bench.nbytes, first, rounds)
    text = table(options, overrides, summary)
    print(text)
    if options["out"]:
        Path(options["out"]).write_text(f"{text}\n\n```json\n{json.dumps(summary)}\n```\n")
    print(json.dumps(summary))


class Bench:
    """A run in training, and its checkpoints under `folder`. What a method measures is in seconds."""

    def __init__(self, options: dict, overrides: list[str], folder: Path):
        import torch

        from dstrain.checkpoint.store import CheckpointStore
        from dstrain.config.compose import compose
        from dstrain.parallel.dispatch import LocalDispatcher, row_alignment
        from dstrain.precision.policy import resolve_precision
        from dstrain.train.state import RunState, build_state, initialise
        from dstrain.train.step import Stepper

        torch.set_num_threads(int(options["threads"]))
        config = compose("train", [
            f"model={options['model']}", f"precision={options['precision']}",
            f"data.sequence_length={options['sequence']}",
            f"batch.sequences={options['batch']}", f"batch.micro_sequences={options['batch']}", *overrides,
        ])[0]
        device = torch.device("cpu")
        precision = resolve_precision(config.precision.name, device)
        self.model, self.optimizer = build_state(config, precision, device)
        initialise(self.model, self.optimizer, seed=0)
        width = config.data.sequence_length + 1 + config.model.num_nextn_predict_layers
        tokens = torch.randint(0, config.model.vocab_size, (config.batch.sequences, width))
        stream = type("Stream", (), {"batch": lambda self, first, count: (tokens, torch.zeros_like(tokens))})()
        dispatcher = LocalDispatcher(row_alignment(device, precision.compute))
        self.stepper, self.state = Stepper(config, self.model, self.optimizer, dispatcher, stream), RunState()
        self.steps, self.folder = int(options["steps"]), folder
        self.store = CheckpointStore(folder / "checkpoints", keep=1)
        self.step(), self.step()
        parts = self.tensors().values()
        self.nbytes = sum(tensor.nbytes for tensor in parts)

    def tensors(self):
        from dstrain.train.state import run_tensors

        return run_tensors(self.model, self.optimizer)

    def step(self) -> float:
        begin = time.perf_counter()
        self.stepper.step(self.state)
        return time.perf_counter() - begin

    def disk(self) -> dict[str, float]:
        path, block = self.folder / "plain", os.urandom(BLOCK)
        begin = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for left in range(self.nbytes, 0, -BLOCK):
                file.write(block[:left])
            os.fsync(file.fileno())
        write = time.perf_counter() - begin
        forget(path)
        begin, into = time.perf_counter(), bytearray(BLOCK)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(into):
                pass
        read = time.perf_counter() - begin
        path.unlink()
        return {"disk_write": write, "disk_read": read}

    def _begin_save(self) -> float:
        """-> seconds that the caller stood still."""
        begin = time.perf_counter()
        self.store.save(self.state.step, self.tensors(), {"format": 1, "state": self.state.to_meta()}, {})
        return time.perf_counter() - begin

    def _end_save(self) -> None:
        failure = self.store.wait()
        if failure:
            sys.exit(failure)

    def save(self) -> dict[str, float]:
        self.state.step += 1  # a checkpoint of its own
        begin = time.perf_counter()
        still = self._begin_save()
        self._end_save()
        return {"still": still, "durable": time.perf_counter() - begin}

    def behind(self) -> dict[str, float]:
        usual = statistics.median(self.step() for _ in range(self.steps))
        begin, took = time.perf_counter(), []
        still = self._begin_save()
        while self.store.writing():
            took.append(self.step())
        durable = time.perf_counter() - begin
        self._end_save()
        return {"step": usual, "behind_still": still, "behind_durable": durable, "steps_behind": len(took),
                "slower": sum(took) - usual * len(took)}

    def restore(self) -> dict[str, float]:
        from dstrain.train.state import restore

        for path in (self.folder / "checkpoints").rglob("*"):
            if path.is_file():
                forget(path)
        begin = time.perf_counter()
        path = self.store.open_newest(print)
        verified = time.perf_counter()
        restore(self.model, self.optimizer, path)
        return {"verify": verified - begin, "load": time.perf_counter() - verified}


def forget(path: Path) -> None:
    """Let the page cache drop a file that is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def summarise(nbytes: int, first: dict, rounds: list[dict]) -> dict:
    median = {key: statistics.median(of_round[key] for of_round in rounds) for key in rounds[0]}
    return {
        "gb": nbytes / 1e9, "first_still": first["still"], "first_durable": first["durable"], **median,
        "still_share": statistics.median(r["still"] / r["durable"] for r in rounds),
        "first_still_share": first["still"] / first["durable"],
        "write_rate_share": statistics.median(r["disk_write"] / r["durable"] for r in rounds),
        "restore_rate_share": statistics.median(r["disk_read"] / (r["verify"] + r["load"]) for r in rounds),
        "lost_share": statistics.median((r["behind_still"] + r["slower"]) / r["behind_durable"] for r in rounds),
        "rounds": rounds,
    }


def table(options: dict, overrides: list[str], s: dict) -> str:
    def line(what: str, seconds: float, note: str = "", rate: bool = True) -> str:
        gb_per_second = f"{s['gb'] / seconds:.2f}" if rate else ""
        return f"| {what} | {seconds:.3f} | {gb_per_second} | {note} |"

    words = " ".join([f"model={options['model']}", *overrides])
    return "\n".join([
        f"{words}, {options['precision']}, {options['threads']} threads: {s['gb']:.2f} GB; {cpu_name()}, "
        f"torch {version('torch')}, {date.today()}; medians of {len(s['rounds'])} rounds",
        "", "| what | s | GB/s | |", "|---|---|---|---|",
        line("plain write and fsync", s["disk_write"]),
        line("save, until durable", s["durable"], f"{s['write_rate_share']:.2f} of the plain write's rate"),
        line("the caller stands still", s["still"], f"{s['still_share']:.1%} of that", rate=False),
        line("the same, first save", s["first_still"],
             f"{s['first_still_share']:.1%} of its {s['first_durable']:.3f} s", rate=False),
        line(f"save behind {s['steps_behind']:g} steps of {s['step']:.3f} s, until durable", s["behind_durable"]),
        line("these steps took longer by", s["slower"],
             f"with standing still {s['lost_share']:.1%} of the time until durable", rate=False),
        line("plain read", s["disk_read"]),
        line("check of all bytes", s["verify"]),
        line("loading", s["load"], f"both: {s['restore_rate_share']:.2f} of the plain read's rate"),
    ])


if __name__ == "__main__":
    main()
