"""The size of the global batch as a function of the tokens consumed. Other schedules are config/schedule.py's."""

from dstrain.config.schema import BatchConfig


def batch_sequences(config: BatchConfig, tokens: int) -> int:
    """Sequences of the global batch that starts after `tokens` tokens: linear ramp, rounded down to a multiple."""
    ramp = config.ramp
    if ramp is None or tokens >= ramp.until:
        return config.sequences
    grown = int((config.sequences - ramp.start) * tokens / ramp.until)
    return ramp.start + grown // ramp.multiple * ramp.multiple
