"""Parameters laid out in flat buckets, so that they are communicated as they lie in memory.

A bucket holds parameters of one replica group and one type. It owns two flat buffers: the weights, of which the
parameters are views, and the gradients, of which their `main_grad`s are views. Both are cut into one equal part a rank
of the group: the part that this rank reduces, updates and sends to the others. One rank owns the whole.

Each parameter begins at a multiple of ALIGN elements; the gaps hold zeros. The layout depends on names, shapes and the
group alone, so all ranks of a group have the same.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.parallel.group import Group
from dstrain.parallel.replicas import Replicas

ALIGN = 64  # elements: 128 bytes of BF16
BUCKET = 1 << 25  # elements after which a bucket is full; a larger parameter has a bucket of its own


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    begin: int


class Bucket:
    def __init__(self, group: Group, slots: list[Slot], main: torch.dtype):
        """Moves the parameters of `slots`, with their values, into a new flat buffer; main_grads begin at zero."""
        self.group, self.slots = group, slots
        last = slots[-1]
        size = _up(last.begin + last.parameter.numel(), ALIGN * group.size)
        first = slots[0].parameter
        self.weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(size, dtype=main, device=first.device)
        for slot in slots:
            place, parameter = slice(slot.begin, slot.begin + slot.parameter.numel()), slot.parameter
            self.weights[place].copy_(parameter.detach().reshape(-1))
            parameter.data = self.weights[place].view(parameter.shape)
            parameter.main_grad = self.grads[place].view(parameter.shape)
        part = size // group.size
        self.first, self.end = group.index * part, (group.index + 1) * part  # of this rank's part

    def owned(self, slot: Slot) -> tuple[int, int]:
        """First and end of what this rank owns of a parameter, as places in the bucket; empty where they are equal."""
        first = max(slot.begin, self.first)
        return first, max(min(slot.begin + slot.parameter.numel(), self.end), first)

    def zero_rest(self) -> None:
        """Set the gradients outside this rank's part to zero."""
        self.grads[: self.first].zero_()
        self.grads[self.end :].zero_()

    def __str__(self) -> str:
        more = f" and {len(self.slots) - 1} more" if len(self.slots) > 1 else ""
        return f"{self.slots[0].name}{more}"


def lay_out(
    parameters: Iterable[tuple[str, nn.Parameter]], replicas: Replicas, main: torch.dtype, bucket: int = BUCKET
) -> list[Bucket]:
    """Buckets of at most about `bucket` elements for named parameters, each parameter once.

    Within a replica group they come in the order in which backward completes them: from the last layer to the first.
    """
    waiting: dict[tuple, list[Slot]] = {}
    buckets = []

    def close(key: tuple) -> None:
        slots = waiting.pop(key)
        buckets.append(Bucket(replicas.group(slots[0].name), slots, main))

    for name, parameter in sorted(parameters, key=lambda item: _place(item[0]), reverse=True):
        key = replicas.ranks(name), parameter.dtype
        slots = waiting.setdefault(key, [])
        begin = _up(slots[-1].begin + slots[-1].parameter.numel(), ALIGN) if slots else 0
        if slots and begin + parameter.numel() > bucket:
            close(key)
            slots, begin = waiting.setdefault(key, []), 0
        slots.append(Slot(name, parameter, begin))
    for key in list(waiting):
        close(key)
    return buckets


def _place(name: str) -> tuple:
    """Sorts names as the hidden state passes the parameters: embedding, layers by number, final norm and projection."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer:
        return 1, int(layer[1]), name
    return (0 if "embed" in name else 2), 0, name


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
