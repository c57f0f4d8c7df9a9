"""A value that is a function of the tokens consumed: pieces that hold it, or lead it to another."""

import math
from dataclasses import dataclass

from dstrain.config.schema import Segment
from dstrain.config.validate import resolve_until


@dataclass
class Piece:
    until: float  # tokens
    value: float  # at `until`
    shape: str


class Schedule:
    """Value at some number of consumed tokens; it starts at `start` and stays at the last value for ever."""

    def __init__(self, segments: list[Segment], total_tokens: float, start: float | None = None):
        """start: the value at 0 tokens; None: that of the first segment."""
        self.pieces = [Piece(resolve_until(s.until, total_tokens), s.value, s.shape) for s in segments]
        self.start = start if start is not None else self.pieces[0].value if segments else 0.0

    def __call__(self, tokens: int) -> float:
        begin, value = 0.0, self.start
        for piece in self.pieces:
            if tokens < piece.until:
                progress = (tokens - begin) / (piece.until - begin)
                if piece.shape == "linear":
                    return value + (piece.value - value) * progress
                if piece.shape == "cosine":
                    return piece.value + (value - piece.value) * 0.5 * (1 + math.cos(math.pi * progress))
                return piece.value
            begin, value = piece.until, piece.value
        return value
