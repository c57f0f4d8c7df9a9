"""Jobs for tools/storm.py: four ranks that are quick to start, or launch/torchrun.sh.

Importing costs a rank more than its whole training does here. So one process imports everything, trains nothing, and
forks the ranks: each gets a launcher's environment and a session of its own, runs `dstrain train` and ends as an
interpreter does.

    python tools/storm_ranks.py      that process: requests on its standard input, what happened on its standard output
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "DSTRAIN_STORM"  # in the environment of every process of a storm
GRACE = 5.0  # seconds in which processes that were killed or have ended are gone


def environment(mark: str, **more: object) -> dict[str, str]:
    """This Python and this source, one thread a rank, the loopback network."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {MARK: mark, "PYTHONPATH": path, "DSTRAIN_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1",
             "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **fixed, **{key: str(value) for key, value in more.items()}}


class Job:
    """Processes of one start of a run: `pids` by rank, `outputs` where they write."""

    def __init__(self, outputs: list[Path]):
        self.pids: dict[int, int] = {}
        self.outputs = outputs
        self.begun = time.monotonic()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def codes(self) -> dict[int, int]:
        """Exit codes of those that have ended, negative for a signal."""
        raise NotImplementedError

    def ended(self) -> bool:
        return len(self.codes()) == len(self.pids)

    def text(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in self.outputs)

    def errors(self) -> list[str]:
        """The lines that tell why it failed."""
        return [line for line in self.text().splitlines() if line.startswith("dstrain: ")]


class Ranks(Job):
    """Forked ranks, joined without a launcher: rank 0 keeps the key-value store."""

    def __init__(self, nursery: "Nursery", arguments: list[str], size: int, folder: Path):
        super().__init__([folder / f"rank-{rank}.txt" for rank in range(size)])
        self.nursery = nursery
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        for rank, output in enumerate(self.outputs):
            place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place = {key: str(value) for key, value in place.items()}
            self.pids[rank] = nursery.fork({"arguments": arguments, "environment": place, "output": str(output)})

    def codes(self) -> dict[int, int]:
        self.nursery.read()
        return {rank: self.nursery.codes[pid] for rank, pid in self.pids.items() if pid in self.nursery.codes}


class Torchrun(Job):
    """launch/torchrun.sh with restarts. `pids` are the ranks' of the start that `look` has seen last."""

    def __init__(self, mark: str, arguments: list[str], size: int, folder: Path, restarts: int):
        super().__init__([folder / "torchrun.txt"])
        self.mark = mark
        variables = environment(mark, NPROC=size, MAX_RESTARTS=restarts, STOP_SECONDS=60)
        with self.outputs[0].open("w") as file:
            self.launcher = subprocess.Popen(
                ["bash", str(ROOT / "launch/torchrun.sh"), *arguments], env=variables, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )

    def look(self) -> int:
        """-> how many ranks live now, which become `pids`."""
        self.pids = {int(variables["RANK"]): pid for pid, variables in processes(self.mark) if "RANK" in variables}
        return len(self.pids)

    def codes(self) -> dict[int, int]:
        """The launcher's."""
        return {} if self.launcher.poll() is None else {0: self.launcher.returncode}

    def ended(self) -> bool:
        return self.launcher.poll() is not None


class Nursery:
    """The process that forks ranks. `codes`: process -> exit code, of all that have ended."""

    def __init__(self, mark: str):
        self.codes: dict[int, int] = {}
        self._answers: list[int] = []
        self._rest = b""
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(mark), bufsize=0,
        )
        self._await(1, 120)

    def fork(self, request: dict) -> int:
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._await(1, 30)

    def read(self) -> None:
        while select.select([self.process.stdout], [], [], 0)[0]:
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the process that forks ranks has ended")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                pid, code = json.loads(line)
                if code is None:
                    self._answers.append(pid)
                else:
                    self.codes[pid] = code

    def close(self) -> None:
        self.process.stdin.close()  # it kills what is left and ends
        self.process.wait(30)
        self.process.stdout.close()

    def _await(self, count: int, seconds: float) -> int:
        wait_until(lambda: self.read() or len(self._answers) >= count, seconds, "the process that forks ranks")
        return self._answers.pop(0)


def wait_until(condition: Callable[[], object], seconds: float, what: str, pause: float = 0.01) -> None:
    """Raises TimeoutError, which says what did not come."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(pause)


def processes(mark: str) -> list[tuple[int, dict[str, str]]]:
    """Every process that a storm has started and that lives, with the environment that it was started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
            if f"{MARK}={mark}" in lines:
                found.append((int(entry.name), dict(line.split("=", 1) for line in lines if "=" in line)))
    return found


def end_all(mark: str, but: int) -> list[int]:
    """Kill what is left of a storm's processes. -> those that were."""
    left = [pid for pid, _ in processes(mark) if pid != but]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    wait_until(lambda: all(pid == but for pid, _ in processes(mark)), GRACE, "killed processes to be gone")
    return left


def serve() -> dict:
    """Forks ranks on request until the input ends. Returns in every rank, with its request."""
    children: set[int] = set()
    say = lambda *what: os.write(1, json.dumps(what).encode() + b"\n")  # noqa: E731
    say(os.getpid(), None)
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            line = sys.stdin.buffer.readline()
            if not line:
                break
            pid = os.fork()
            if pid == 0:
                return json.loads(line)
            children.add(pid)
            say(pid, None)
        for pid in list(children):
            done, state = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                say(pid, os.waitstatus_to_exitcode(state))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    sys.exit(0)


def main() -> int:
    from dstrain.cli import main as command
    from dstrain.config.compose import compose
    import dstrain.train.main  # noqa: F401

    compose("train", [])  # what Hydra reads once
    gc.freeze()
    request = serve()
    os.setsid()
    with open(request["output"], "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ |= request["environment"]
    return command(["train", *request["arguments"]])


if __name__ == "__main__":
    sys.exit(main())
