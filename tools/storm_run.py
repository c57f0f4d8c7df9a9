"""One run in a storm: its starts, from which checkpoint each has to continue, and moments to wait for."""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from storm_disk import Disk
from storm_judge import last_step, newest_intact, saving, status
from storm_ranks import Job, Nursery, Ranks, Torchrun, end_all, wait_until

MARGIN = 45.0  # seconds that anything may last beyond parallel.timeout: starts, verdicts and stacks on busy cores
START = 180.0  # seconds for a start, or for a step that nobody disturbs


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
        self, layout: str, arguments: list[str], size: int, folder: Path, disk: Disk, nursery: Nursery, mark: str,
        draw: random.Random, timeout: float,
    ):
        self.layout, self.size, self.folder, self.disk = layout, size, folder, disk
        self.nursery, self.mark, self.arguments, self.draw, self.timeout = nursery, mark, arguments, draw, timeout
        self.path = (disk.path if folder == disk.path.parent else folder) / layout
        self.outputs = folder / "outputs" / layout
        self.outputs.mkdir(parents=True, exist_ok=True)
        self.job: Job | None = None
        self.damaged = 0
        self.limit = timeout + MARGIN
        self.expected = 0  # the step from which the start under way had to continue

    def finish(self, steps: int | None = None) -> list[str]:
        """To the end, which by default is some steps on."""
        problems: list[str] = []
        try:
            self.stop_job(problems)
            self.start(problems, steps=steps or newest_intact(self.path) + 5)
            while not self.job.ended():
                step = last_step(self.path)
                wait_until(lambda: self.job.ended() or last_step(self.path) != step, START, "a step or the end")
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
            problems.append(f"it continued from step {found[0]}, the newest intact checkpoint was {self.expected}")

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
