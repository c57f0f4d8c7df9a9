"""Bytes that are alive, by kind, while training code runs: every storage that an operation makes, until it is freed.

A storage counts with its own bytes, once, whatever views it has; what an allocator adds by rounding and fragments is
not counted, nor what an operation needs inside itself. Kinds are those of planner/memory.py. What nobody has said
anything about is an activation.

Without data an operation's result is its shape, which follows from those of its operands: PyTorch is asked once for
each (some of its answers take a tenth of a millisecond), and then the shape is known.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")
_known: dict[tuple, list | None] = {}  # an operation and its operands -> its results; None: always ask
Tensors = Counter[tuple[str, tuple[int, ...], torch.dtype]]  # (kind, shape, type) -> how many


@dataclass
class Peak:
    """The moment with most bytes. tensors: what was alive, each with the shape that it was made in."""

    total: int = 0
    bytes: Counter = field(default_factory=Counter)
    tensors: Tensors = field(default_factory=Counter)


class Ledger(TorchDispatchMode):
    """Inside `with`, counts. peak: up to now."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter = Counter()
        self.total = 0
        self._tensors: Tensors = Counter()
        self._peak = Peak()
        self._alive: dict[int, tuple[str, int, tuple[int, ...], torch.dtype, weakref.ref]] = {}
        self._making = "activations"

    @property
    def peak(self) -> Peak:
        self._note_peak()
        return self._peak

    def forget_peak(self) -> None:
        """From here on `peak` begins anew."""
        self._peak = Peak()

    def kind(self, tensor: torch.Tensor) -> str | None:
        """What a tensor is counted as; None: it is not."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return found and found[0]

    def count_as(self, kind: str, *tensors: torch.Tensor) -> None:
        """From now on."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._alive:
                old, size, shape, dtype, ref = self._alive[key]
                self._add(old, -size, shape, dtype)
                self._alive[key] = kind, size, shape, dtype, ref
                self._add(kind, size, shape, dtype)
            else:
                self._enter(tensor, kind)

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Inside, new storages are of this kind."""
        outer, self._making = self._making, kind
        try:
            yield
        finally:
            self._making = outer

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        way = _way(func)
        key = _key(func, args, kwargs) if way else None
        known = _known.get(key) if key else None
        if known is None:
            out = func(*args, **kwargs)
            if key and key not in _known:
                _known[key] = _answer(way, args, kwargs, out)
        elif way == "in place":
            return args[0]
        else:
            out = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in known]
            out = out[0] if len(out) == 1 else tuple(out)
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor):
                self._see(one)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage()._cdata not in self._alive:
            self._enter(tensor, self._making)

    def _enter(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key, size, shape = storage._cdata, storage.nbytes(), tuple(tensor.shape)
        self._alive[key] = kind, size, shape, tensor.dtype, weakref.ref(storage, lambda _: self._leave(key))
        self._add(kind, size, shape, tensor.dtype)

    def _leave(self, key: int) -> None:
        self._note_peak()
        kind, size, shape, dtype, _ = self._alive.pop(key)
        self._add(kind, -size, shape, dtype)

    def _add(self, kind: str, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.bytes[kind] += size
        self.total += size
        self._tensors[kind, shape, dtype] += 1 if size > 0 else -1

    def _note_peak(self) -> None:
        """Only what is freed can end a peak, so it is looked at then and not at every new storage."""
        if self.total > self._peak.total:
            self._peak = Peak(self.total, Counter(self.bytes), +self._tensors)


@lru_cache(maxsize=None)
def _way(func) -> str | None:
    """new: makes its results. in place: writes to its first operand and gives that. None: a view, or something else."""
    schema = func._schema
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    makes = schema.returns and all(one.alias_info is None and str(one.type) == "Tensor" for one in schema.returns)
    if makes and not any(writes):
        return "new"
    if writes[:1] == [True] and not any(writes[1:]) and len(schema.returns) == 1 and (
        schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags
    ):
        return "in place"
    return None


def _key(func, args: tuple, kwargs: dict) -> tuple | None:
    """What the shape of the result follows from; None where an operand has data."""
    parts = [func]
    for x in (*args, *kwargs.values()):
        for one in x if isinstance(x, (tuple, list)) else (x,):
            if not isinstance(one, torch.Tensor):
                parts += type(one), one  # 2 and 2.0 are equal, and make different types
            elif one.is_meta:
                parts.append((one.shape, one.stride(), one.dtype))
            else:
                return None
        parts.append(len(x) if isinstance(x, (tuple, list)) else "")
    return *parts, *kwargs


def _answer(way: str, args: tuple, kwargs: dict, out) -> list | None:
    if way == "in place":
        return []
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    operands = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, (tuple, list)) else (x,))]
    storages = {x.untyped_storage()._cdata for x in operands if isinstance(x, torch.Tensor)}
    if any(x is None or x.device.type != "meta" or x.untyped_storage()._cdata in storages for x in results):
        return None
    return [(x.shape, x.stride(), x.dtype) for x in results]
