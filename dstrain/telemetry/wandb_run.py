"""A run's record in W&B, which can neither stop nor slow the run.

wandb lives in a process of its own (`wandb_process`), and this side never waits for it before the run's end: records go
into a pipe that does not block, what the pipe does not take is kept up to LIMIT bytes, what is beyond is dropped with a
warning. metrics.jsonl has everything in any case. The id of the W&B run is kept in the run folder, so a continued run
continues its curves there.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dstrain.config.schema import ModelConfig, TelemetryConfig
from dstrain.telemetry.wandb_mode import default_project, resolve_mode
from dstrain.telemetry.wandb_names import LOAD, STEP, eval_values, layer_names, load_histogram, step_values

LIMIT = 2**24  # bytes that wait for wandb: thousands of steps
START = 180.0  # seconds after which a wandb that has not started is given up; its own limit is 90
# Seconds that the end of a run waits for it. Within 15 wandb has written all to its file, which `wandb sync` sends.
WAIT = 30.0
HISTOGRAM_EVERY = 50  # steps
ID_FILE = "wandb.id"


class NoWandb:
    """In the place of WandbRun where nothing is recorded, and on ranks other than the first."""

    def step(self, record: dict) -> None:
        pass

    def evaluation(self, record: dict) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def start_wandb(
    telemetry: TelemetryConfig, folder: Path, model: ModelConfig, run_name: str, config: dict,
    say: Callable[[str], None],
) -> "WandbRun | NoWandb":
    """The record of the run in `folder`. config: what is attached to it, as plain containers, with the group `code`."""
    mode, line = resolve_mode(telemetry.wandb)
    if line:
        say(line)
    if mode == "disabled":
        return NoWandb()
    try:
        identity = run_id(folder)
        start = {
            "mode": mode, "dir": str(folder.resolve()), "id": identity,
            "project": telemetry.wandb_project or default_project(), "entity": telemetry.wandb_entity,
            "group": telemetry.wandb_group, "name": telemetry.wandb_name or run_name, "config": config,
            "stats_pid": os.getpid(),
        }
        run = WandbRun(start, folder / "logs" / "wandb.log", layer_names(model), say)
    except OSError as error:
        say(f"WARNING: wandb: {error.strerror} ({error.filename or folder}); nothing is recorded there")
        return NoWandb()
    say(f"wandb: {mode}, run {identity}, log in {run.log}")
    return run


def run_id(folder: Path) -> str:
    """The id of this run in W&B, made once."""
    path = folder / ID_FILE
    with suppress(FileNotFoundError):
        found = path.read_text(errors="replace").strip()
        if re.fullmatch(r"[\w-]{1,64}", found):
            return found
    identity = secrets.token_hex(4)
    part = path.with_suffix(".part")
    part.write_text(f"{identity}\n")
    os.replace(part, path)
    return identity


class WandbRun:
    """This side of `wandb_process`. No method raises."""

    def __init__(self, start: dict, log: Path, layers: list[str], say: Callable[[str], None]):
        """layers: `layer_names` of the model. say: takes lines for people. Raises OSError where it does not start."""
        self.log, self.layers, self.say = log, layers, say
        self.directory = None  # where wandb keeps its files, once it is up
        self.warned: set[str] = set()
        self.pending, self.heard = bytearray(), bytearray()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dstrain.telemetry.wandb_process"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, bufsize=0,
                start_new_session=True,  # signals of the terminal are not for it
            )
        self.to, self.of = self.process.stdin, self.process.stdout
        for pipe in (self.to, self.of):
            os.set_blocking(pipe.fileno(), False)
        self.begun, self.lives, self.ending = time.monotonic(), True, False
        self._send(start)

    def step(self, record: dict) -> None:
        """An object of metrics.jsonl."""
        self._send({"values": step_values(record, self.layers)})
        histogram = load_histogram(record["moe_load"]) if record[STEP] % HISTOGRAM_EVERY == 0 else None
        if histogram is not None:
            counts, edges = histogram
            self._send({"histogram": LOAD, "counts": counts, "edges": edges, STEP: record[STEP]})

    def evaluation(self, record: dict) -> None:
        """An object of eval.jsonl."""
        self._send({"values": eval_values(record)})

    def finish(self) -> None:
        """The run has ended well: give wandb at most WAIT seconds to send the rest."""
        self.ending = True
        self._send({"finish": 0})
        begun, spoken = time.monotonic(), False
        while self.lives and (seconds := time.monotonic() - begun) < WAIT:
            self._exchange()
            if not self.pending:
                self.to.close()
            if seconds > 2 and not spoken:
                self.say(f"waiting for wandb to finish, at most {WAIT:.0f} s")
                spoken = True
            time.sleep(0.02)
        if self.lives:
            rest = f"; `wandb sync --include-online {self.directory}` sends it" if self.directory else ""
            self._warn("end", f"not everything was sent within {WAIT:.0f} s{rest}")
        elif self.process.wait() != 0 and not self.warned & {"gone", "start"}:
            self._warn("gone", f"its process failed at the end, records may be missing there (log: {self.log})")
        self._kill()

    def close(self) -> None:
        """The run has failed, or `finish` was called. What wandb has by now it sends by itself."""
        self.ending = True
        if self.lives:
            self._exchange()
            self._leave()

    def _send(self, message: dict) -> None:
        if not self.lives:
            return
        line = json.dumps(message).encode() + b"\n"
        if len(self.pending) + len(line) > LIMIT:
            self._warn("full", f"it does not keep up, some records are missing there (log: {self.log})")
        else:
            self.pending += line
        self._exchange()
        if self.lives and self.directory is None and time.monotonic() - self.begun > START:
            self._warn("start", f"it has not started within {START:.0f} s, nothing is recorded there (log: {self.log})")
            self._kill()

    def _exchange(self) -> None:
        """Write and read what the pipes take and have."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self.pending and not self.to.closed:
                written = os.write(self.to.fileno(), bytes(self.pending[:65536]))
                del self.pending[:written]
        with suppress(BlockingIOError):
            while self.lives:
                text = os.read(self.of.fileno(), 65536)
                self.heard += text
                *lines, self.heard = self.heard.split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
                if not text:
                    self.lives = False
        if not self.lives and not self.ending:
            self._warn("gone", f"its process has ended, nothing more is recorded there (log: {self.log})")
            self._kill()

    def _answer(self, message: dict) -> None:
        if "lost" in message:
            self._warn("gone", f"{message['lost']}; nothing is recorded there (log: {self.log})")
        elif "warning" in message:
            self._warn("failing", message["warning"])
        else:
            self.directory = message["up"]
            self.say(f"wandb: {message['url'] or f'recording in {self.directory}, `wandb sync` sends it'}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            self.say(f"WARNING: wandb: {text}")

    def _leave(self) -> None:
        self.lives = False
        self.pending.clear()
        for pipe in (self.to, self.of):
            pipe.close()

    def _kill(self) -> None:
        """The end of the process and of the pipes to it."""
        self._leave()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
