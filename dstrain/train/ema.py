"""The exponential moving average of the weights, in host memory (arXiv 2412.19437 §3.2.3).

    average = decay · average + (1 - decay) · weight        after every update that is applied

The weight is the optimizer's master, and each rank averages the ranges that it updates (ZeRO-1), so the average costs
4 bytes a parameter in all, once for all replicas. It begins as the weights are when it is turned on.

The routing biases are averaged with the same decay. They steer the scores of the weights that they were fitted to, step
by step, so to averaged weights belongs the average over the same steps; the newest bias would fit the newest weights.

On CUDA nothing waits for it: a thread fetches the masters piece by piece through pinned memory, on a stream of its own,
and averages on the host while the next step computes. The masters change again at that step's end, which waits for what
is left.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from dstrain.config.schema import EmaConfig
from dstrain.model.model import Model
from dstrain.train.optimizer import AdamW

PIECE = 1 << 24  # elements that are fetched at once; two pieces are under way


class Ema:
    """The average of one rank's ranges of the masters, and of its biases. `start` or a checkpoint gives it values."""

    def __init__(self, model: Model, optimizer: AdamW, config: EmaConfig):
        self.decay, self.every = config.decay, config.every
        self._new_share = 1 - config.decay**config.every
        # What the optimizer has no state of are the routing biases.
        self._sources = {
            name: optimizer.states[name].master if name in optimizer.states else tensor
            for name, tensor in model.state_dict().items()
        }
        self._values = {name: torch.empty(len(source), dtype=source.dtype) for name, source in self._sources.items()}
        self._cuda = model.device.type == "cuda"
        self._background = self._cuda
        self._stream = torch.cuda.Stream(model.device) if self._cuda else None
        self._staging: dict[torch.dtype, list[torch.Tensor]] = {}
        self._pool = ThreadPoolExecutor(1, "ema")
        self._pending: Future | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return sum(value.nbytes for value in self._values.values())

    def values(self) -> dict[str, torch.Tensor]:
        """Name -> this rank's range [n] of the average, in the main type, and whole biases [experts] in FP32."""
        self.wait()
        return self._values

    def start(self) -> None:
        """Begin with the weights and biases as they are."""
        for name, value in self.values().items():
            value.copy_(self._sources[name])

    def update(self, updates: int) -> None:
        """Take in the weights after the `updates`-th applied update, counted from 1, if it is this one's turn."""
        if updates % self.every:
            return
        if self._background:
            ready = torch.cuda.current_stream().record_event() if self._cuda else None
            self._pending = self._pool.submit(self._fetch, ready)
            return
        for name, value in self._values.items():
            value.lerp_(self._sources[name], self._new_share)

    def wait(self) -> None:
        """Until the last `update` has read all masters and biases, which must stand still so long."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    @torch.no_grad()
    def _fetch(self, ready: torch.cuda.Event | None) -> None:
        """ready: behind what writes the masters; None on the CPU."""
        under_way: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = deque()

        def average() -> None:
            value, staged, copied = under_way.popleft()
            if copied is not None:
                copied.synchronize()
            value.lerp_(staged, self._new_share)

        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            for number, (value, source) in enumerate(self._pieces()):
                staged = self._buffers(source.dtype)[number % 2][: len(source)]
                staged.copy_(source, non_blocking=True)
                under_way.append((value, staged, self._stream.record_event() if self._stream else None))
                if len(under_way) == 2:
                    average()
            while under_way:
                average()

    def _pieces(self):
        for name, value in self._values.items():
            yield from zip(value.split(PIECE), self._sources[name].split(PIECE), strict=True)

    def _buffers(self, dtype: torch.dtype) -> list[torch.Tensor]:
        if dtype not in self._staging:
            self._staging[dtype] = [torch.empty(PIECE, dtype=dtype, pin_memory=self._cuda) for _ in range(2)]
        return self._staging[dtype]
