"""Jobs of several ranks as users start them: launch scripts and `dstrain train`, with a small run's overrides."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ranks import free_ports

ROOT = Path(__file__).resolve().parents[1]


def overrides(config) -> list[str]:
    """A composed configuration as the overrides that lead to it."""
    return list(_flat(dataclasses.asdict(config), ""))


def _flat(plain: dict, prefix: str):
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            segments = ",".join("{" + ",".join(f"{k}: {v}" for k, v in item.items()) + "}" for item in value)
            yield f"{prefix}{key}=[{segments}]"
        elif value is None or isinstance(value, (list, bool)):
            yield f"{prefix}{key}={json.dumps(value)}"
        else:
            yield f"{prefix}{key}={value}"


def environment(**more: object) -> dict[str, str]:
    """Of a launcher: this Python, this source, one thread a rank, the loopback network."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    path = f"{ROOT}{os.pathsep}{kept['PYTHONPATH']}" if kept.get("PYTHONPATH") else str(ROOT)
    fixed = {"DSTRAIN_PYTHON": sys.executable, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
             "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **fixed, **{key: str(value) for key, value in more.items()}}


class Job:
    """Some processes that are one job. Leaving `with` kills whatever is left of them."""

    def __init__(self, folder: Path, commands: list[tuple[list[str], dict]]):
        """commands: of each process, its command line and environment."""
        self.outputs = [folder / f"output-{number}.txt" for number in range(len(commands))]
        self.processes = []
        for (command, variables), output in zip(commands, self.outputs):
            with output.open("w") as file:
                self.processes.append(subprocess.Popen(
                    command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True,
                ))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            for pid in [process.pid, *_descendants(process.pid)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait(30)

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for process in self.processes:
            for pid in [process.pid, *_descendants(process.pid)]:
                command, variables = (_of_process(pid, kind) for kind in ("cmdline", "environ"))
                if f"RANK={number}" in variables and "dstrain" in command[:4]:
                    return pid
        raise AssertionError(f"rank {number} is not running: {self.text()}")

    def wait(self, seconds: float = 240) -> list[int]:
        """Exit codes."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not over after {seconds} s: {self.text()}") from None
        return [process.returncode for process in self.processes]

    def text(self) -> str:
        return "\n".join(output.read_text(errors="replace") for output in self.outputs)

    def wait_for(self, condition, what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, f"waiting for {what}: {ended} {self.text()}"
            time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *_descendants(child))]


def _of_process(pid: int, kind: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{kind}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def ranks(
    folder: Path, size: int, arguments: list[str], command: str = "train", program: str = "", odd: tuple = ()
) -> Job:
    """The ranks of a job without any launcher: process N is rank N. odd: more arguments of the last rank alone.

    program: Python that takes the arguments, in place of `dstrain <command>`.
    """
    port = free_ports(1)[0]
    start = ["-c", program, "dstrain"] if program else ["-m", "dstrain", command]
    return Job(folder, [
        ([sys.executable, *start, *arguments, *(odd if rank == size - 1 else ())],
         environment(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size, MASTER_ADDR="localhost",
                     MASTER_PORT=port))
        for rank in range(size)
    ])


@dataclass
class Node:
    """Where a launcher runs. enter: goes before its command; variables: into its environment."""

    name: str = "localhost"
    enter: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


@contextmanager
def two_nodes(folder: Path) -> Iterator[list[Node]]:
    """Two host names with a network each and one cable between them, where this process may make them; else localhost.

    The namespaces end with the processes in them.
    """
    names = folder / "etc-hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} node{i}\n" for i in range(2)))
    holders, nodes = [], [Node(), Node()]
    try:
        for i in range(2 if all(map(shutil.which, ("unshare", "nsenter", "ip"))) else 0):
            made = f"hostname node{i} && mount --bind {names} /etc/hosts && ip link set lo up && echo made"
            command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"{made} && exec sleep 3600"]
            holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        if holders and all(holder.stdout.readline() == b"made\n" for holder in holders) and _cable(holders):
            nodes = [
                Node(f"node{i}", ["nsenter", "-t", str(holder.pid), "-n", "-u", "-m", "env", "-C", str(folder)],
                     {"GLOO_SOCKET_IFNAME": "cable"})
                for i, holder in enumerate(holders)
            ]
        yield nodes
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(30)
            holder.stdout.close()


def _cable(holders: list[subprocess.Popen]) -> bool:
    one, other = (str(holder.pid) for holder in holders)
    commands = [f"ip link add cable netns {one} type veth peer name cable netns {other}"]
    for i, pid in enumerate((one, other)):
        commands += [f"nsenter -t {pid} -n ip address add 10.77.0.{i + 1}/24 dev cable",
                     f"nsenter -t {pid} -n ip link set cable up"]
    return all(subprocess.run(command.split(), capture_output=True).returncode == 0 for command in commands)
