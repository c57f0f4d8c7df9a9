"""Spikes of the loss: which step is one. What follows is `skip` in step.py and `rollback` in trainer.py.

    spike:  loss_main > m + guard.deviations · max(1.4826 · MAD, 0.001 · |m|)

m and MAD: median, and median absolute deviation from it, of loss_main in the last guard.window applied steps. 1.4826
MAD is the standard deviation of a normal distribution, and unlike one it does not grow with the spikes it has to find.
The decision comes before the update, from numbers that all ranks have alike, bit for bit.

A spike's update is never applied: like a non-finite step it consumes its samples and its step number, while weights,
moments, biases and tokens stand still. `rollback` also takes weights, moments, biases, generators, tokens, updates and
the window back to the newest complete checkpoint. Samples and steps go on, so the data between that checkpoint and the
spike, the spike's included, is not seen again; every undone step counts as skipped.
"""

import statistics

from dstrain.config.schema import GuardConfig

FLOOR = 1e-3  # of the median: where losses hardly vary, rounding is no spike


def is_spike(loss: float, recent: list[float], guard: GuardConfig) -> bool:
    """recent: the losses of the applied steps before, at most guard.window. Never while there are fewer."""
    if guard.spikes == "off" or len(recent) < guard.window:
        return False
    median = statistics.median(recent)
    deviation = statistics.median(abs(value - median) for value in recent)
    return loss > median + guard.deviations * max(1.4826 * deviation, FLOOR * abs(median))


def remember(loss: float, recent: list[float], guard: GuardConfig) -> None:
    """An applied step's loss."""
    if guard.spikes != "off":
        recent.append(loss)
        del recent[: -guard.window]
