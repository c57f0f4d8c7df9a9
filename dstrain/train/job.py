"""What a rank has beside its training: its log, the signals that stop it, the watch over others, its record in W&B."""

import faulthandler
import platform
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from dstrain.config.errors import InputError, StoppedElsewhere
from dstrain.parallel.group import CommunicationError, Group, one_line
from dstrain.parallel.place import here
from dstrain.parallel.watch import PATIENCE, Watch
from dstrain.parallel.world import World
from dstrain.telemetry.console import RunConsole
from dstrain.telemetry.rank_log import RankLog
from dstrain.telemetry.wandb_run import NoWandb, WandbRun
from dstrain.train.signals import StopSignals

ON_CUDA = 0.9  # of parallel.timeout: NCCL ends the process at all of it, and nothing could be said any more


class RunFailure(RuntimeError):
    """The run cannot go on, on all ranks alike: one line why. Exit code 1."""


class Job:
    """Of one rank. A single rank has no watch, and the first one alone a record in W&B."""

    def __init__(self, world: World):
        self.world, self.log, self.watch = world, None, None
        self.until_closed = ExitStack()
        self.wandb: WandbRun | NoWandb = NoWandb()

    def open_log(self, folder: Path, console: RunConsole) -> None:
        """`<folder>/logs/rank-N.log` gets what `console` says; of ranks but the first, everything they print."""
        try:
            self.log = RankLog(folder / "logs", self.world.rank, redirect=not self.world.is_first)
        except OSError as error:
            where = error.filename or folder / "logs"
            raise InputError(f"{where}: no log can be written there: {error.strerror}") from None
        console.log = self.log.say
        self.log.say(f"rank {self.world.rank} of {self.world.size} on {platform.node()}")

    def obey_signals(self) -> StopSignals:
        """From here to `close`: a launcher signals the ranks that are left as soon as one has died, and they have yet to
        say who it was.
        """
        return self.until_closed.enter_context(StopSignals())

    def start_watch(
        self, ranks: Group, hosts: list[str], timeout: float, on_verdict: Callable[[str], None]
    ) -> None:
        """From here to `end` a rank that fails or hangs ends the job. on_verdict(line): before this process ends."""
        if self.world.store is None:  # a single rank, or ranks that were joined by somebody else's group
            return

        def verdict(line: str, speaks: bool) -> None:
            own = self.watch.failure[0] if self.watch.failure else here
            self.log.say(f"this rank, {self.world.rank}, was in {own}")
            self.log.say(line)
            self.log.stacks()
            if speaks:
                self.log.on_console(f"dstrain: {line}; stacks in {self.log.path.parent}")
            with suppress(OSError):
                on_verdict(line)

        limit = timeout * ON_CUDA if torch.cuda.is_initialized() else None
        self.watch = Watch(self.world, here, hosts, verdict, limit)
        ranks.gather_objects(None, "the start of the watch")
        self.watch.start()

    def failed(self, error: BaseException) -> str | None:
        """Tell the others at once. Failures of all ranks alike are not told. -> the verdict, if there is one already."""
        if self.watch is None:
            return None
        if isinstance(error, (RunFailure, StoppedElsewhere)):
            self.watch.stop()
        else:
            own = not isinstance(error, CommunicationError)
            words = one_line(error)
            words = f"{type(error).__name__}: {words}" if own else words
            self.watch.report(words if ", step " in words else f"{here}: {words}", own)  # the executor says where it was
        return self.watch.verdict

    def verdict(self) -> bool:
        """Behind `failed`: wait until it is known who it was. -> whether there is a watch that says so.

        From here the process ends by itself or is ended: at an interpreter's end gloo waits for ranks that are gone.
        """
        if self.watch is not None and self.watch.failure is not None:
            self.watch.wait()
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            return True
        return False

    def end(self, ranks: Group) -> None:
        """The run is over; no rank leaves before all know."""
        if self.watch is not None:
            self.watch.stop()
            ranks.gather_objects(None, "the end of the run")
            self.watch = None

    def close(self) -> None:
        self.until_closed.close()
        self.wandb.close()
        if self.log is not None:
            self.log.close()
