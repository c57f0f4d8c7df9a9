"""ZeRO-1 (arXiv 1910.02054): gradients are reduced to the rank that owns their part of the optimizer state.

    reduce-scatter of every bucket's gradients over its replica group (sum, in the main type)
    each rank updates its part of the bucket                          (train/optimizer.py)
    all-gather of the updated weights                                 (in the parameter's type)

Losses are divided by global counts before backward, so gradients are summed, never averaged. A bucket starts as soon as
its last gradient is complete, but never before the buckets of its group in front of it: two ranks of a group may
complete their stages in different orders (DualPipe's two copies do), and a group's collectives must have one order.
"""

from collections.abc import Iterable

from dstrain.parallel.buckets import Bucket
from dstrain.parallel.group import Started


class GradientReduction:
    """The reduce-scatters of one step. Afterwards a bucket's own part holds the sum over its replica group."""

    def __init__(self, buckets: list[Bucket]):
        self.buckets = buckets
        self._of = {slot.name: number for number, bucket in enumerate(buckets) for slot in bucket.slots}
        self.reset()

    def reset(self) -> None:
        """Begin a step; gradients are zero again."""
        self._missing = [{slot.name for slot in bucket.slots} for bucket in self.buckets]
        self._queues: dict[tuple[int, ...], list[int]] = {}  # ranks -> buckets not started yet, in order
        for number, bucket in enumerate(self.buckets):
            self._queues.setdefault(bucket.group.ranks, []).append(number)
        self._started: list[Started] = []
        self._finished = False

    def ready(self, names: Iterable[str]) -> None:
        """These parameters' gradients are complete for this step; starts every bucket that now is.

        On CUDA the caller's stream is the one that has computed them. A parameter that several stages of a rank use is
        complete after the last of them. Raises ValueError for a name that is here twice in a step.
        """
        touched = set()
        for name in names:
            number = self._of[name]
            if self._finished or name not in self._missing[number]:
                raise ValueError(f"the gradient of {name} is complete already in this step")
            self._missing[number].discard(name)
            touched.add(self.buckets[number].group.ranks)
        for ranks in sorted(touched):
            queue = self._queues[ranks]
            while queue and not self._missing[queue[0]]:
                self._start(queue.pop(0))

    def finish(self) -> None:
        """All gradients are complete: start what is left and wait for everything. Once a step; again does nothing.

        Raises CommunicationError that names the bucket and its ranks.
        """
        if self._finished:
            return
        for ranks in sorted(self._queues):
            for number in self._queues[ranks]:
                self._start(number)
        self._queues = {}
        while self._started:
            self._started.pop(0).wait()
        self._finished = True

    def _start(self, number: int) -> None:
        bucket = self.buckets[number]
        self._started.append(bucket.group.reduce_scatter(bucket.grads, f"the gradients of {bucket}"))


def start_gather(bucket: Bucket) -> Started:
    """Send this rank's part of the updated weights to all of the replica group."""
    return bucket.group.all_gather(bucket.weights, f"the weights of {bucket}")
