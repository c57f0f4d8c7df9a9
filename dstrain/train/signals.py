"""SIGTERM, SIGUSR1, Ctrl-C and a closed terminal finish the step that runs; a second signal, later, stops at once.

Python runs a signal's handler in the main thread, once the call is over that it is in: that may be a wait for a rank that
hangs. So a thread hears of the signals, through the pipe that the interpreter writes each one's number into.

A signal to any rank stops all of them after the same step. Where a whole job is signalled, as by Slurm or a container's
end, each rank gets it twice: itself, and passed on by torchrun. Within ECHO seconds that is one signal. SIGUSR1 is what
Slurm can send ahead of a job's time limit.
"""

import os
import signal
import threading
import time

import torch

from dstrain.parallel.group import Group

ECHO = 2.0
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopSignals:
    """`received` names the first signal. Inside `with`, the handlers are ours; after it, the former ones again."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._first = 0.0  # when it came; a signal to another rank alone has left it, so that the next here is obeyed

    def __enter__(self) -> "StopSignals":
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)  # the interpreter wants it
        self._former_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        # What was started with a signal ignored (nohup, a background job of a script) goes on ignoring it.
        numbers = [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
        self._former = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_pipe)
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)

    def _listen(self) -> None:
        while numbers := os.read(self._reading, 64):
            for number in numbers:
                if number in self._former:
                    self.handle(number)

    def handle(self, number: int) -> None:
        if self.received is not None:
            if time.monotonic() - self._first > ECHO:
                os._exit(128 + number)
            return
        self._first, self.received = time.monotonic(), signal.Signals(number).name

    def agree(self, ranks: Group) -> str | None:
        """The name of a signal that any of `ranks` has received; the same on all, which must all call this."""
        if ranks.size > 1:
            mine = torch.tensor([self.received == number.name for number in NUMBERS], dtype=torch.int64)
            seen = ranks.total(mine, "stop signals").tolist()
            names = [number.name for number, count in zip(NUMBERS, seen) if count]
            self.received = self.received or next(iter(names), None)
            return next(iter(names), None)
        return self.received
