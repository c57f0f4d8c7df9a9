"""What a rank does with signals: the first finishes the step, its echo changes nothing, a later one stops at once."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dstrain.train import signals
from dstrain.train.signals import StopSignals


def test_a_signal_passed_on_once_more_is_the_same_one_and_a_later_one_stops_at_once(monkeypatch):
    now, ended = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    stop = StopSignals()
    stop.handle(signal.SIGTERM)
    now[0] += signals.ECHO
    stop.handle(signal.SIGTERM)
    stop.handle(signal.SIGINT)
    assert (stop.received, ended) == ("SIGTERM", [])
    now[0] += 0.1
    stop.handle(signal.SIGINT)
    assert (stop.received, ended) == ("SIGTERM", [128 + signal.SIGINT])


def test_signals_are_heard_while_the_main_thread_waits_for_a_rank_that_hangs(monkeypatch):
    """The wait is one of torch's own, in which Python runs no handler; the end of the process is what ends it here."""
    store, ended = dist.HashStore(), []
    monkeypatch.setattr(signals, "ECHO", 0.1)
    monkeypatch.setattr(signals.os, "_exit", lambda code: (ended.append((stop.received, code)), store.set("over", "")))

    def send():
        for number in (signal.SIGUSR1, signal.SIGTERM):
            time.sleep(0.3)
            os.kill(os.getpid(), number)

    with StopSignals() as stop:
        sender = threading.Thread(target=send)
        sender.start()
        store.wait(["over"], timedelta(seconds=20))
        sender.join()
    assert ended == [("SIGUSR1", 128 + signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_former_handlers_are_back_afterwards(number):
    former = signal.getsignal(number)
    with StopSignals():
        assert signal.getsignal(number) != former
    assert signal.getsignal(number) == former
