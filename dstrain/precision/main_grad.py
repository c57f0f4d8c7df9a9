"""`main_grad`, the only gradient that anything reads, and the queue of put-off weight gradients.

Every parameter owns one accumulator in the main type (FP32; FP64 under precision=fp64). Linear layers write
it themselves, at once or later from a queue; for every other parameter a hook moves autograd's `.grad` there.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def attach_main_grads(module: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter of `module` a zeroed `main_grad` of `dtype` and the hook that fills it."""
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        parameter.register_post_accumulate_grad_hook(_move_grad)


def _move_grad(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:  # a Linear's weight has none: it wrote main_grad itself
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


class WeightGradQueue:
    """Weight-gradient closures that a schedule put off; `pop` runs the oldest chunk."""

    def __init__(self) -> None:
        self._chunks: deque[list[Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._chunks)

    def pop(self) -> None:
        with torch.no_grad():  # as inside a backward; what closures hold may require gradients
            for closure in self._chunks.popleft():
                closure()

    def open_chunk(self) -> list[Callable[[], None]]:
        self._chunks.append([])
        return self._chunks[-1]


_open_chunk: list[Callable[[], None]] | None = None


@contextmanager
def deferred(queue: WeightGradQueue) -> Iterator[None]:
    """Inside, weight gradients become one chunk of `queue` instead of being computed."""
    global _open_chunk
    outer, _open_chunk = _open_chunk, queue.open_chunk()
    try:
        yield
    finally:
        _open_chunk = outer


def now_or_deferred(closure: Callable[[], None]) -> None:
    """Run a weight-gradient step, or leave it in the chunk that is open."""
    if _open_chunk is None:
        closure()
    else:
        _open_chunk.append(closure)
