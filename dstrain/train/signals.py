"""SIGTERM and Ctrl-C finish the step that runs; a second one stops at once."""

import os
import signal


class StopSignals:
    """`received` names the first signal. Inside `with`, the handlers are ours; after it, the former ones again."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> "StopSignals":
        self._former = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
