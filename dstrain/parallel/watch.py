"""A rank that fails, dies or hangs ends the job: who it was, where it was, and what the others waited in.

Every rank has a thread that writes the rank's place into the job's key-value store each second, and looks whether a
rank has reported a failure. A rank reports when its communication fails or times out, or when it fails by itself. Then
all ranks write their places quickly for some seconds; the first to report finds the culprit:

    a rank whose writing has stopped     dead, stopped (SIGSTOP) or out of reach
    else one that failed by itself       an exception that is not about communication
    else one that waits for nobody       it computes, reads or hangs, while others wait for it

and publishes one line, the verdict. Every rank logs it and ends. The thread does not need the main one, which may
wait in a collective. Where the store itself does not answer, its keeper is the culprit: rank 0, or torchrun.
"""

import json
import os
import threading
import time
from collections.abc import Callable

from dstrain.parallel.place import Place
from dstrain.parallel.world import World

POLL = 1.0  # seconds between two looks
FAST = 0.2  # the same once a failure is known
WINDOW = 3.0  # seconds in which a rank that lives writes its place
PATIENCE = 10.0  # seconds for the verdict, and for an interpreter to end
LEAVE = 60.0  # seconds that a save under way gets once a rank has failed, whose part may be missing
SHOWN = 4  # ranks that are named one by one


class Watch:
    """Of one rank of several. `start` and `stop` are called by all."""

    def __init__(
        self,
        world: World,
        here: Place,
        hosts: list[str],
        on_verdict: Callable[[str, bool], None],
        limit: float | None = None,
    ):
        """hosts: of every rank. on_verdict(line, speaks): called once, from any thread, with whether this rank's
        console is the one to show the line. limit: seconds without a move inside a step, after which this rank reports
        itself; None: the collectives' own timeouts do.
        """
        if world.store is None:
            raise ValueError("ranks without a store cannot watch each other")
        self.world, self.here, self.hosts, self.on_verdict, self.limit = world, here, hosts, on_verdict, limit
        self.store = world.store.clone()  # a connection of its own: a call that blocks must not block the main thread
        self.failure: tuple[str, bool] | None = None  # this rank's line, and whether it failed by itself
        self.verdict: str | None = None
        self._beats, self._moved = 0, (here.moves, time.monotonic())
        self._answered = time.monotonic()
        self._stopped, self._failed, self._over = threading.Event(), threading.Event(), threading.Event()
        self._wake = threading.Event()  # one of the first two has come
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._beat()

    def start(self) -> None:
        """Every rank has made its Watch."""
        self._thread.start()

    def stop(self) -> None:
        """The run is over, or all ranks fail alike; they may leave from now on.

        The thread has ended when this returns: the end of the interpreter aborts a process that has a thread in a call
        of the store.
        """
        self._stopped.set()
        self._wake.set()
        self._thread.join(PATIENCE)

    def report(self, line: str, own: bool) -> None:
        """This rank has failed. own: by itself, not because of a communication. Returns at once."""
        if self.failure is None:
            self.failure = line, own
            self._failed.set()
            self._wake.set()

    def wait(self) -> str:
        """Behind `report`: until the verdict is known, and the others have had time to read it. -> the verdict."""
        if not self._over.wait(WINDOW + 3 * PATIENCE):
            self._give(self._keeper(), speaks=self.world.local_rank == 0 or self.world.rank == 1)
        return self.verdict or ""

    def _run(self) -> None:
        threading.Thread(target=self._guard_store, name="watch-store", daemon=True).start()
        try:
            while not (self._wake.wait(POLL) and self._stopped.is_set()):
                self._check_limit()
                self._beat()
                self._answered = time.monotonic()
                if self._failed.is_set() or self.store.check(["failures"]):
                    return self._judge()
        except RuntimeError:
            if not self._stopped.wait(POLL):  # not the end of the run, where the store's keeper may go first
                self._give(self._keeper(), speaks=self.world.local_rank == 0 or self.world.rank == 1)
                self._end()

    def _guard_store(self) -> None:
        """A keeper that is stopped answers nobody, and then `_run` waits for ever: end in its place."""
        while not self._stopped.wait(POLL) and self.verdict is None:
            if self._failed.is_set() and time.monotonic() - self._answered > WINDOW + PATIENCE:
                self._give(self._keeper(), speaks=self.world.local_rank == 0 or self.world.rank == 1)
                self._end()

    def _check_limit(self) -> None:
        moves, since = self._moved
        if self.here.moves != moves or self.here.step == 0:
            self._moved = self.here.moves, time.monotonic()
        elif self.limit is not None and time.monotonic() - since > self.limit:
            self.report(f"no progress for {self.limit:g} s in {self.here}", own=False)

    def _beat(self) -> None:
        self._beats += 1
        line, own = self.failure or (None, False)
        waits, place = self.here.waits is not None, str(self.here)
        beat = {"beats": self._beats, "place": place, "waits": waits, "line": line, "own": own}
        self.store.set(f"place/{self.world.rank}", json.dumps(beat))

    def _beat_for(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            self._beat()
            self._answered = time.monotonic()
            time.sleep(FAST)

    def _judge(self) -> None:
        """A failure is known: find who it was, or wait for who does; then end."""
        reports = self._failed.is_set()
        leads = self.store.add("failures", int(reports)) == 1 and reports
        if leads:
            before = self._places()
            self._beat_for(WINDOW)
            line, suspects = diagnose(before, self._places(), self.hosts)
            self.store.set("verdict", json.dumps([line, suspects]))
        else:
            self._beat_for(WINDOW + PATIENCE, until=lambda: self.store.check(["verdict"]))
        if not self.store.check(["verdict"]):
            line, suspects = f"a rank has failed, and none could say which; this one was in {self.here}", [0]
        else:
            line, suspects = json.loads(self.store.get("verdict"))
        self._give(line, speaks=self.world.rank == 0 or leads and 0 in suspects)
        self._beat_for(3 * POLL)  # the others still look whether this one lives; and it keeps the store, perhaps
        self._end()

    def _places(self) -> list[dict]:
        return [json.loads(text) for text in self.store.multi_get([f"place/{rank}" for rank in range(self.world.size)])]

    def _keeper(self) -> str:
        return (
            f"the job's key-value store does not answer: its keeper, rank 0 on {self.hosts[0]} or the launcher there, "
            f"is dead, stopped or out of reach; this one, rank {self.world.rank} on {self.hosts[self.world.rank]}, was in "
            f"{self.failure[0] if self.failure else self.here}"
        )

    def _give(self, line: str, speaks: bool) -> None:
        if self.verdict is None:
            self.verdict = line
            self.on_verdict(line, speaks)

    def _end(self) -> None:
        """The main thread may be in a wait that does not end; one that has reported ends by itself, if it can."""
        self._over.set()
        if self._failed.is_set():
            self._stopped.wait(LEAVE + PATIENCE)
        if not self._stopped.is_set():
            os._exit(1)


def diagnose(before: list[dict], after: list[dict], hosts: list[str]) -> tuple[str, list[int]]:
    """One line from every rank's place, written at two moments WINDOW seconds apart; and the ranks that it blames."""
    ranks = range(len(after))
    silent = [rank for rank in ranks if after[rank]["beats"] == before[rank]["beats"]]
    own = [rank for rank in ranks if after[rank]["own"]]
    busy = [rank for rank in ranks if not after[rank]["waits"] and after[rank]["line"] is None]
    if silent:
        suspects, what = silent, "gives no sign of life (dead, stopped or out of reach), last seen in "
    elif own:
        suspects, what = own, "failed: "
    elif busy:
        suspects, what = busy, "is late: others wait for it while it is in "
    else:
        suspects, what = [rank for rank in ranks if after[rank]["line"]][:1], "was the first whose wait failed: "
    named = [f"rank {rank} on {hosts[rank]} {what}{_told(after[rank])}" for rank in suspects[:SHOWN]]
    more = f"; so {len(suspects) - SHOWN} more" if len(suspects) > SHOWN else ""
    others = {}
    for rank in ranks:
        if rank not in suspects:
            others.setdefault(_told(after[rank]), []).append(str(rank))
    rest = [f"rank {', '.join(alike[:SHOWN])}{', …' if len(alike) > SHOWN else ''} in {told}"
            for told, alike in others.items()]
    line = "; ".join(named) + more + (f". The others: {'; '.join(rest[:SHOWN])}" if rest else "")
    return line + (f"; … {len(rest) - SHOWN} more" if len(rest) > SHOWN else ""), suspects


def _told(place: dict) -> str:
    return place["line"] or place["place"]
