"""What a rank does with signals: the first finishes the step, its echo changes nothing, a later one stops at once."""

import os
import signal

import pytest

from dstrain.train import signals
from dstrain.train.signals import StopSignals


def test_a_signal_passed_on_once_more_is_the_same_one_and_a_later_one_stops_at_once(monkeypatch):
    now, ended = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        now[0] += signals.ECHO
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.received, ended) == ("SIGTERM", [])
        now[0] += 0.1
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.received, ended) == ("SIGTERM", [128 + signal.SIGINT])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_former_handlers_are_back_afterwards(number):
    former = signal.getsignal(number)
    with StopSignals():
        assert signal.getsignal(number) != former
    assert signal.getsignal(number) == former
