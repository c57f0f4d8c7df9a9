"""One run in a storm: its starts, the moments of its disturbances, and what is expected of each."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from storm_judge import checkpoints, last_step, newest_intact, saving, status
from storm_ranks import Job, Nursery, Ranks, Torchrun, end_all, wait_until

KINDS = {
    "kill": "kill -9 of one rank",
    "term": "SIGTERM to one rank",
    "stop": "SIGSTOP of one rank",
    "disk": "full disk",
    "flip": "kill -9 of all, a bit of the newest checkpoint flips",
    "cut": "kill -9 of all, a file of the newest checkpoint is cut",
    "second": "a second SIGTERM in the save",
    "torchrun": "kill -9 of one rank, torchrun starts all again",
}
MARGIN = 45.0  # seconds that anything may last beyond parallel.timeout: starts, verdicts and stacks on busy cores
START = 180.0  # seconds for a start
ECHO = 2.2  # a second signal counts two seconds after the first


@dataclass
class Outcome:
    kind: str
    layout: str
    what: str = ""  # in words
    moment: str = ""
    seconds: float = 0.0  # from the disturbance to its end
    named: float | None = None  # seconds until the line that names the rank
    restarts: int = 0
    lost: int = 0  # steps that had been made and were made again
    problems: list[str] = field(default_factory=list)


class Run:
    """One run folder; `job` is the start that is under way, if any."""

    def __init__(
        self, layout: str, arguments: list[str], size: int, folder: Path, disk: "Disk", nursery: Nursery, mark: str,
        draw: random.Random, timeout: float,
    ):
        self.layout, self.size, self.folder, self.disk, self.nursery, self.mark = layout, size, folder, disk, nursery, mark
        self.arguments, self.draw, self.timeout = arguments, draw, timeout
        self.path = (disk.path if folder == disk.path.parent else folder) / layout
        self.outputs = folder / "outputs" / layout
        self.outputs.mkdir(parents=True, exist_ok=True)
        self.job: Job | None = None
        self.damaged = 0
        self.limit = timeout + MARGIN
        self.expected = 0  # the step from which the start under way had to continue

    def round(self, kind: str) -> Outcome:
        outcome = Outcome(kind, self.layout)
        try:
            getattr(self, f"_{kind}")(outcome)
        except TimeoutError as error:
            outcome.problems.append(str(error))
        if outcome.problems or self.job is not None and self.job.ended():
            self._keep(outcome)
            self.stop_job(outcome.problems)
        return outcome

    def finish(self, steps: int | None = None) -> list[str]:
        """To the end, which by default is some steps on."""
        problems: list[str] = []
        try:
            self.stop_job(problems)
            self.start(problems, steps=steps or newest_intact(self.path) + 5)
            wait_until(self.job.ended, START + self.limit, "the end of the run")
            if status(self.path).get("status") != "finished" or set(self.job.codes().values()) != {0}:
                problems.append(f"the run did not finish: {status(self.path)}, exit codes {self.job.codes()}")
        except TimeoutError as error:
            problems.append(str(error))
        if problems:
            print(self.job.text()[-5000:])
        self.stop_job(problems)
        return problems

    def state_step(self) -> int:
        return last_step(self.path)

    # A start --------------------------------------------------------------------------------------------------------

    def start(self, problems: list[str], steps: int = 10**6, launcher: bool = False, wait: bool = True) -> None:
        """Start the run, and see from which checkpoint it continues."""
        self.expected = newest_intact(self.path)
        arguments = [*self.arguments, f"run.dir={self.path.parent}", f"run.name={self.layout}", f"run.steps={steps}"]
        self.before = self._metrics_file()
        if launcher:
            self.job = Torchrun(self.mark, arguments, self.size, self.outputs, restarts=1)
        else:
            self.job = Ranks(self.nursery, arguments, self.size, self.outputs)
        if wait:
            self._await_begin(problems)

    def _await_begin(self, problems: list[str], text_from: int = 0) -> None:
        wait_until(lambda: self.begun() or self.job.ended(), START, "the first step")
        text = self.job.text()[text_from:]
        if not self.begun():
            raise TimeoutError(f"the start ended: {self.job.codes()} {' '.join(text.split())[-600:]}")
        told = re.search(r"continuing from \S+/step-(\d+): step (\d+)", text)
        found = (int(told[1]), int(told[2])) if told else (0, 0)
        if found != (self.expected, self.expected):
            problems.append(f"the start continued from step {found[0]}, the newest intact checkpoint was {self.expected}")

    def begun(self) -> bool:
        """Whether the start under way trains: it has written its metrics file anew."""
        return self._metrics_file() not in (None, self.before)

    def _metrics_file(self) -> int | None:
        try:
            return (self.path / "metrics.jsonl").stat().st_ino
        except OSError:
            return None

    def ready(self, outcome: Outcome) -> None:
        """The run trains."""
        if self.job is None:
            self.start(outcome.problems)

    def stop_job(self, problems: list[str]) -> None:
        """End what is left of the start under way; it counts as stray where the start had ended."""
        over = self.job is None or self.job.ended()
        left = end_all(self.mark, but=self.nursery.process.pid)
        if over and left:
            problems.append(f"{len(left)} stray processes")
        self.job = None

    # Moments --------------------------------------------------------------------------------------------------------

    def moment(self, outcome: Outcome, save: bool | None = None) -> None:
        """Wait for a random moment: in some step soon, or in a save."""
        save = self.draw.random() < 0.5 if save is None else save
        outcome.moment = "a save" if save else "a step"
        target = last_step(self.path) + self.draw.randint(1, 4)
        self.progress(lambda: last_step(self.path) >= target, "some steps")
        if save:
            self.progress(lambda: saving(self.path), "a save", pause=0.001)
            time.sleep(self.draw.choice([0.0, self.draw.uniform(0, 0.03)]))
        else:
            time.sleep(self.draw.uniform(0, 0.2))

    def progress(self, condition: Callable[[], object], what: str, pause: float = 0.01) -> None:
        wait_until(lambda: condition() or self.job.ended(), self.limit, what, pause)
        if self.job.ended() and not condition():
            raise TimeoutError(f"the run ended before {what}: {self.job.codes()} {self.job.errors()}")

    # Disturbances ---------------------------------------------------------------------------------------------------

    def _kill(self, outcome: Outcome) -> None:
        victim = self.draw.randrange(self.size)
        if self.job is None and self.draw.random() < 0.35:
            self.start(outcome.problems, wait=False)
            outcome.moment = "the start"
            time.sleep(self.draw.uniform(0, 4))
        else:
            self.ready(outcome)
            self.moment(outcome)
        outcome.what = f"kill -9 of rank {victim} in {outcome.moment}"
        trains = self.begun()
        self.job.signal(victim, signal.SIGKILL)
        begin = time.monotonic()
        if trains:
            self._dies(outcome, begin, victim)
        else:
            for rank in set(range(self.size)) - {victim} - set(self.job.codes()):  # as every launcher does
                self.job.signal(rank, signal.SIGTERM)
            self._over(outcome, begin)
        self._count(outcome, most=4)

    def _stop(self, outcome: Outcome) -> None:
        victim = self.draw.randrange(self.size)
        self.ready(outcome)
        self.moment(outcome)
        outcome.what = f"SIGSTOP of rank {victim} in {outcome.moment}"
        self.job.signal(victim, signal.SIGSTOP)
        self._dies(outcome, time.monotonic(), victim)
        self._count(outcome, most=4)

    def _dies(self, outcome: Outcome, begin: float, victim: int) -> None:
        """The others end with 1, and one line names the victim, which then is killed if it is only stopped."""
        others = set(range(self.size)) - {victim}
        wait_until(lambda: self.job.errors() or others <= self.job.codes().keys(), self.limit, f"a line ({outcome.what})")
        outcome.named = time.monotonic() - begin
        wait_until(lambda: others <= self.job.codes().keys(), self.limit, f"the others' end ({outcome.what})")
        outcome.seconds = time.monotonic() - begin
        if victim not in self.job.codes():
            self.job.signal(victim, signal.SIGKILL)
        wait_until(self.job.ended, 30, "the end of a killed rank")
        wanted = {rank: 1 for rank in others} | {victim: -signal.SIGKILL}
        if self.job.codes() != wanted:
            outcome.problems.append(f"exit codes {self.job.codes()}, not {wanted}")
        lines = self.job.errors()
        if len(lines) != 1 or f"rank {victim} on " not in lines[0].split(". The others: ")[0].split("; this one,")[0]:
            outcome.problems.append(f"not one line that names rank {victim}: {lines}")

    def _over(self, outcome: Outcome, begin: float) -> None:
        wait_until(self.job.ended, max(begin + self.limit - time.monotonic(), 0.0), f"the end ({outcome.what})")
        outcome.seconds = time.monotonic() - begin

    def _count(self, outcome: Outcome, most: int | None = None) -> None:
        """The job is over, and will be started again. most: steps that may be lost.

        A save goes on beside the steps to the next one, and is waited for then: so what is lost are at most the steps
        between three saves.
        """
        outcome.restarts = 1
        outcome.lost = last_step(self.path) - newest_intact(self.path)
        if most is not None and outcome.lost > most:
            outcome.problems.append(f"{outcome.lost} steps are lost")

    def _term(self, outcome: Outcome) -> None:
        self.ready(outcome)
        self.moment(outcome)
        rank = self.draw.randrange(self.size)
        outcome.what = f"SIGTERM to rank {rank} in {outcome.moment}"
        self.job.signal(rank, signal.SIGTERM)
        self._interrupted(outcome, {number: 0 for number in range(self.size)})

    def _interrupted(self, outcome: Outcome, codes: dict[int, int]) -> None:
        self._over(outcome, time.monotonic())
        self._count(outcome)
        told, steps = status(self.path), (last_step(self.path), newest_intact(self.path))
        if self.job.codes() != codes:
            outcome.problems.append(f"exit codes {self.job.codes()}, not {codes}")
        if (told.get("status"), told.get("signal")) != ("interrupted", "SIGTERM") or {*steps} != {told.get("step")}:
            outcome.problems.append(f"status {told}, last step and checkpoint {steps}")

    def _disk(self, outcome: Outcome) -> None:
        self.ready(outcome)
        self.moment(outcome)
        killed = self.draw.random() < 0.5
        outcome.what = f"full disk in {outcome.moment}"
        begin = time.monotonic()
        try:
            # Again and again: a save that had its room already deletes the checkpoint before the last.
            for what, count in ("was not saved", 1), (r"(?m)^step \d+  loss", self.draw.randint(0, 10)):
                said = len(re.findall(what, self.job.text()))
                self.progress(lambda: self.disk.fill(self.job.pids) or len(re.findall(what, self.job.text())) >= said + count,
                              "a warning of the full disk, and some steps")
                outcome.seconds = outcome.seconds or time.monotonic() - begin
            if self.job.ended() or self.job.codes():
                outcome.problems.append(f"the run did not live: {self.job.codes()} {self.job.errors()}")
            elif killed:
                outcome.what += ", then kill -9 of all"
                self._kill_all()
        finally:
            self.disk.free(self.job.pids)
        if killed or outcome.problems:
            self._count(outcome)
        else:
            before = newest_intact(self.path)
            self.progress(lambda: checkpoints(self.path) and checkpoints(self.path)[0][0] > before, "the next checkpoint")

    def _kill_all(self) -> None:
        for rank in set(range(self.size)) - self.job.codes().keys():
            self.job.signal(rank, signal.SIGKILL)
        wait_until(self.job.ended, 30, "the end of killed ranks")

    def _flip(self, outcome: Outcome) -> None:
        def flip(path: Path) -> str:
            data = bytearray(path.read_bytes())
            bit = self.draw.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            return f"bit {bit} of"

        self._damage(outcome, flip)

    def _cut(self, outcome: Outcome) -> None:
        def cut(path: Path) -> str:
            size = self.draw.randrange(path.stat().st_size)
            os.truncate(path, size)
            return f"all behind byte {size} of"

        self._damage(outcome, cut)

    def _damage(self, outcome: Outcome, spoil: Callable[[Path], str]) -> None:
        self.ready(outcome)
        first = last_step(self.path)
        self.progress(lambda: sum(step > first for step, _ in checkpoints(self.path)) >= 2, "two checkpoints")
        self.moment(outcome)
        begin = time.monotonic()
        self._kill_all()
        outcome.seconds = time.monotonic() - begin
        step, newest = checkpoints(self.path)[0]
        path = self.draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        outcome.what = f"kill -9 of all in {outcome.moment}, then {spoil(path)} {path.relative_to(newest.parent)}"
        if newest_intact(self.path) != step:
            self.damaged += 1
        self._count(outcome, most=6)

    def _second(self, outcome: Outcome) -> None:
        self.ready(outcome)
        self.moment(outcome, save=False)
        outcome.moment = "the last save"
        one, held = self.draw.sample(range(self.size), 2)
        self.job.signal(one, signal.SIGTERM)
        wait_until(lambda: saving(self.path) or self.job.ended(), self.limit, "the last save", pause=0.001)
        if self.job.ended():  # it was quicker than this look
            outcome.what, outcome.moment = f"SIGTERM to rank {one}, no second one", "nothing: the save was quicker"
            return self._interrupted(outcome, {number: 0 for number in range(self.size)})
        self.job.signal(held, signal.SIGSTOP)  # a rank whose disk is slow: the save of all waits for its part
        time.sleep(ECHO)
        gone = [one] if self.draw.random() < 0.5 else [rank for rank in range(self.size) if rank != held]
        outcome.what = f"SIGTERM to rank {one}, and in the save to {', '.join(map(str, gone))}"
        gone = [rank for rank in gone if rank not in self.job.codes()]
        again = time.monotonic()
        for rank in gone:
            self.job.signal(rank, signal.SIGTERM)
        wait_until(lambda: set(gone) <= self.job.codes().keys(), 10, f"{outcome.what}: an end at once")
        outcome.seconds = time.monotonic() - again
        self.job.signal(held, signal.SIGCONT)
        wait_until(self.job.ended, self.limit, f"the end ({outcome.what})")
        if any(self.job.codes()[rank] != 128 + signal.SIGTERM for rank in gone):
            outcome.problems.append(f"exit codes {self.job.codes()}")
        self._count(outcome)

    def _torchrun(self, outcome: Outcome) -> None:
        self.stop_job(outcome.problems)
        self.start(outcome.problems, launcher=True)
        self.moment(outcome)
        self.job.look()
        victim = self.draw.randrange(self.size)
        outcome.what = f"kill -9 of rank {victim} in {outcome.moment} under torchrun"
        old, said, begin = set(self.job.pids.values()), len(self.job.text()), time.monotonic()
        self.job.signal(victim, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in old), self.limit, "the ranks' end")
        outcome.seconds = time.monotonic() - begin
        self.expected, self.before = newest_intact(self.path), self._metrics_file()
        outcome.lost, outcome.restarts = last_step(self.path) - self.expected, 1
        self._await_begin(outcome.problems, said)
        lines = [line for line in self.job.errors() if f"rank {victim} on " in line.split(". The others: ")[0]]
        if len(lines) != 1:
            outcome.problems.append(f"not one line that names rank {victim}: {self.job.errors()}")
        self.moment(Outcome("", ""))
        self.job.look()
        self.job.signal(self.draw.randrange(self.size), signal.SIGTERM)
        lost = outcome.lost
        self._interrupted(outcome, {0: 0})
        outcome.lost, outcome.restarts = lost, 2

    def _keep(self, outcome: Outcome) -> None:
        """For whoever looks into a problem: what the ranks said, and the run's folder."""
        if outcome.problems:
            where = self.outputs.parent / f"problem-{self.layout}-{time.time_ns()}"
            shutil.copytree(self.outputs, where)
            shutil.copytree(self.path / "logs", where / "logs", dirs_exist_ok=True)
            print(f"what the ranks said is in {where}", flush=True)


class Disk:
    """Where the runs lie. fill(): nothing more can be written there; free(): as before."""

    def __init__(self, path: Path, mounted: bool):
        self.path, self.mounted = path, mounted
        self.what = "a tmpfs of 64 MiB" if mounted else "a limit of 0 bytes on the ranks' files (no tmpfs may be mounted)"

    def fill(self, pids: dict[int, int]) -> None:
        if not self.mounted:
            return self._limit(pids, 0)
        with (self.path / "ballast").open("ab", buffering=0) as file:
            for size in (2**20, 2**12, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    def free(self, pids: dict[int, int]) -> None:
        if self.mounted:
            (self.path / "ballast").unlink(missing_ok=True)
        else:
            self._limit(pids, resource.RLIM_INFINITY)

    def _limit(self, pids: dict[int, int], soft: int) -> None:
        for pid in pids.values():
            try:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
            except ProcessLookupError:
                pass


@contextmanager
def make_disk(path: Path) -> Iterator[Disk]:
    """A small file system at `path`, if this process has its own mounts; else a folder."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "storm", str(path)]
    own = os.environ.get("DSTRAIN_STORM_MOUNTS") == "own"
    yield Disk(path, own and subprocess.run(mount, capture_output=True).returncode == 0)
