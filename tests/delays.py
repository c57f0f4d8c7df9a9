"""Dispatchers whose communication takes time: one wire for the rank, which carries one message after the other.

Rows are moved at once, as the inner dispatcher does it; a result may be used when the wire has carried its bytes.
Whoever needs it earlier sleeps, and no core works for it. With a clock of its own a test sets what computation costs.
"""

import time

import torch


class WallClock:
    now = staticmethod(time.perf_counter)

    def sleep_until(self, when: float) -> None:
        if (left := when - self.now()) > 0:
            time.sleep(left)


class OwnClock:
    """This thread's time on a core, and what it was told to sleep: on a machine that others use too."""

    slept = 0.0

    def now(self) -> float:
        return time.thread_time() + self.slept

    def sleep_until(self, when: float) -> None:
        self.slept += max(when - self.now(), 0.0)


class Wire:
    """latency in seconds, bandwidth in bytes a second.

    Counted: messages, their bytes, the seconds they took (`communication`), and those that somebody slept (`exposed`).
    """

    def __init__(self, latency: float, bandwidth: float, clock=None):
        self.latency, self.bandwidth, self.clock = latency, bandwidth, clock or WallClock()
        self.free = self.communication = self.exposed = 0.0
        self.messages = self.nbytes = 0

    def seconds(self, phase: str, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth

    def carry(self, phase: str, pending, rows: torch.Tensor | None = None) -> "Carried":
        """rows: what travels; None: the (first) result."""
        result = pending.wait()
        if rows is None:
            rows = result[0] if isinstance(result, tuple) else result
        seconds = self.seconds(phase, rows.nbytes)
        self.free = max(self.free, self.clock.now()) + seconds
        self.communication += seconds
        self.messages += 1
        self.nbytes += rows.nbytes
        return Carried(self, result, self.free)


class Carried:
    def __init__(self, wire: Wire, result, arrival: float):
        self.wire, self.result, self.arrival = wire, result, arrival

    def wait(self):
        start = self.wire.clock.now()
        self.wire.clock.sleep_until(self.arrival)
        self.wire.exposed += self.wire.clock.now() - start
        return self.result


def slow_down(link, wire: Wire) -> None:
    """From now on what a real dispatcher's `link` exchanges, the counts too, is on `wire`, and really waited for."""
    exchange = link.exchange

    def carried(phase, columns, sent, received):
        return OnTheWay(exchange(phase, columns, sent, received), wire, phase, columns, sum(sent))

    link.exchange = carried


class OnTheWay:
    """An exchange whose latency keeps the wire from nothing: the next one leaves as soon as this one's bytes have."""

    def __init__(self, exchange, wire: Wire, phase: str, columns, rows: int):
        nbytes = rows * sum(tensor[:1].nbytes for tensor, _ in columns)
        self.exchange, self.wire = exchange, wire
        wire.free = max(wire.free, wire.clock.now()) + nbytes / wire.bandwidth
        self.arrival = wire.free + wire.latency
        wire.communication += wire.seconds(phase, nbytes)
        wire.messages += 1
        wire.nbytes += nbytes

    def ready(self) -> bool:
        return self.wire.clock.now() >= self.arrival

    def wait(self):
        columns = self.exchange.wait()
        start = self.wire.clock.now()
        self.wire.clock.sleep_until(self.arrival)
        self.wire.exposed += self.wire.clock.now() - start
        return columns


class DelayedDispatcher:
    def __init__(self, inner, wire: Wire):
        self.inner, self.wire = inner, wire

    def route(self, topk_ids: torch.Tensor, experts: int) -> "DelayedDispatch":
        return DelayedDispatch(self.inner.route(topk_ids, experts), self.wire)


class DelayedDispatch:
    def __init__(self, inner, wire: Wire):
        self.inner, self.wire = inner, wire

    @property
    def offsets(self) -> torch.Tensor:
        return self.inner.offsets

    def ready(self):
        return self.inner.ready()

    def dispatch(self, x, topk_weights):
        return self.wire.carry("dispatch F", self.inner.dispatch(x, topk_weights))

    def combine(self, rows):
        return self.wire.carry("combine F", self.inner.combine(rows), rows)

    def combine_backward(self, grad):
        return self.wire.carry("combine B", self.inner.combine_backward(grad))

    def dispatch_backward(self, grad_rows, grad_row_weights):
        return self.wire.carry("dispatch B", self.inner.dispatch_backward(grad_rows, grad_row_weights), grad_rows)
