"""The disturbances of tools/storm.py, and what is expected of each."""

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from storm_judge import checkpoints, last_step, newest_intact, saving, status
from storm_ranks import wait_until
from storm_run import Outcome, Run

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
ECHO = 2.2  # a second signal counts two seconds after the first
AT_ONCE = 5.0  # on busy cores


class StormyRun(Run):
    """A run that is disturbed, once in a round."""

    def round(self, kind: str) -> Outcome:
        outcome = Outcome(kind, self.layout)
        try:
            getattr(self, f"_{kind}")(outcome)
        except (TimeoutError, ProcessLookupError) as error:  # the latter: a rank that should live has ended
            outcome.problems.append(str(error))
        if outcome.problems or self.job is not None and self.job.ended():
            self._keep(outcome)
            self.stop_job(outcome.problems)
        return outcome

    def _kill(self, outcome: Outcome) -> None:
        victim = self.draw.randrange(self.size)
        if self.job is None and self.draw.random() < 0.35:
            self.start(outcome.problems, wait=False)
            outcome.moment = "the start"
            time.sleep(self.draw.uniform(0, 4))
        else:
            self.ready(outcome)
            self.moment(outcome)
        trains = self.begun()
        if trains and outcome.moment == "the start":
            outcome.moment = "a step"
        outcome.what = f"kill -9 of rank {victim} in {outcome.moment}"
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
        gone = lambda: others <= self.job.codes().keys()  # noqa: E731
        wait_until(lambda: self.job.errors() or gone(), self.limit, f"a line ({outcome.what})")
        outcome.named = time.monotonic() - begin
        wait_until(gone, self.limit, f"the others' end ({outcome.what})")
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
                wanted = len(re.findall(what, self.job.text())) + count

                def said() -> bool:
                    self.disk.fill(self.job.pids)
                    return len(re.findall(what, self.job.text())) >= wanted

                self.progress(said, "a warning of the full disk, and some steps")
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
            self.progress(lambda: any(step > before for step, _ in checkpoints(self.path)), "the next checkpoint")

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
        told = [one] if self.draw.random() < 0.5 else [rank for rank in range(self.size) if rank != held]
        names = ", ".join(map(str, told))
        for rank in told:
            self.job.signal(rank, signal.SIGTERM)
        wait_until(lambda: saving(self.path) or self.job.ended(), self.limit, "the last save", pause=0.001)
        if self.job.ended():  # it was quicker than this look
            outcome.what, outcome.moment = f"SIGTERM to {names}, no second one", "nothing: the save was quicker"
            return self._interrupted(outcome, {number: 0 for number in range(self.size)})
        self.job.signal(held, signal.SIGSTOP)  # a rank whose disk is slow: the save of all waits for its part
        time.sleep(ECHO)
        outcome.what = f"SIGTERM to {names}, and again in the save"
        gone = [rank for rank in told if rank not in self.job.codes()]
        again = time.monotonic()
        for rank in gone:
            self.job.signal(rank, signal.SIGTERM)
        wait_until(lambda: set(gone) <= self.job.codes().keys(), AT_ONCE, f"{outcome.what}: an end at once")
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
