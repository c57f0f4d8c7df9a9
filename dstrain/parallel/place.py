"""What this process is doing at the moment: step, action, and the communication it waits in.

A process is one rank and trains in one thread, so there is one place, `here`. The executor and everything that waits
for other ranks write it; `watch` reads it from another thread, and tells other ranks when the run is in trouble.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Place:
    """step: the optimizer step, 0 outside of one. doing: the action in it. waits: what it waits for; None: nothing."""

    def __init__(self) -> None:
        self.step = 0
        self.doing: object = "starting"
        self.waits: object = None
        self.moves = 0  # changes with every action and every wait
        self._waited = 0.0
        self._stream_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def at(self, step: int, doing: object) -> None:
        """doing: becomes text only where somebody asks."""
        self.step, self.doing = step, doing
        self.moves += 1

    @contextmanager
    def waiting(self, what: object, stream: bool = False) -> Iterator[None]:
        """Inside, this rank waits for others. stream: on CUDA the current stream waits, while the host goes on."""
        if self.waits is not None:  # a part of a wait that is known
            yield
            return
        self.waits, begin = what, time.perf_counter()
        start = _event() if stream and torch.cuda.is_initialized() else None
        try:
            yield
        finally:
            if start is None:
                self._waited += time.perf_counter() - begin
            else:
                self._stream_waits.append((start, _event()))
            self.waits = None
            self.moves += 1

    def forget_waits(self) -> None:
        """From here on `waited` counts."""
        self._waited, self._stream_waits = 0.0, []

    def waited(self) -> float:
        """Seconds of waiting. On CUDA the streams' waits must be over: call it behind a synchronisation."""
        return self._waited + sum(start.elapsed_time(end) for start, end in self._stream_waits) / 1000

    def __str__(self) -> str:
        where = f"step {self.step}, {self.doing}" if self.step else str(self.doing)
        waits = self.waits
        return where if waits is None else f"{where}: waits in {waits}"


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


here = Place()
