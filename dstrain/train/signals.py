"""SIGTERM, Ctrl-C and a closed terminal finish the step that runs; a second signal stops at once."""

import os
import signal


class StopSignals:
    """`received` names the first signal. Inside `with`, the handlers are ours; after it, the former ones again."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> "StopSignals":
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # What was started with a signal ignored (nohup, a background job of a script) goes on ignoring it.
        numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self._former = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
