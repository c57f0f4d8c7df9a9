"""Held-out loss, accuracy, bits per byte and expert load."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from dstrain.config.schema import TrainConfig
from dstrain.model.batch import MicroBatch
from dstrain.model.loss import LossSums
from dstrain.model.model import Model
from dstrain.parallel.executor import Executor
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.totals import total_counts, total_sums


def evaluate_heldout(
    config: TrainConfig,
    executor: Executor,
    mesh: Mesh,
    windows,
    token_bytes: np.ndarray,
    sequences: int | None,
    step: int,
    go_on: Callable[[int, int], bool] = lambda done, total: True,
    loads: "ExpertLoads | None" = None,
) -> dict | None:
    """Loss and accuracy over the first `sequences` windows of the held-out text (None: all).

    go_on(done, total) is called now and then, on every rank with the same numbers; where it says False on any rank the
    evaluation ends without a result. step: named in errors. loads: takes the experts' load; the routers' own, which is
    training's, stands still.

    windows.batch(first, count) -> tokens, documents [count, L + 1 + D], len(windows). token_bytes: bytes of text that
    each id stands for. bits_per_byte = Σ -log2 p(token) / Σ bytes, over the same predicted tokens; accuracy: the share
    of them that have the largest logit.
    """
    depth, device = config.model.num_nextn_predict_layers, executor.model.device
    total = len(windows) if sequences is None else min(sequences, len(windows))
    sums, counts, nbytes = LossSums(depth, device), torch.zeros(depth + 1, dtype=torch.int64, device=device), 0
    lengths = torch.from_numpy(np.asarray(token_bytes, dtype=np.int64)).to(device)
    size = config.batch.micro_sequences
    places = mesh.dp * size  # windows that one micro-batch of every data rank takes
    most = executor.schedule.micro_batches * places
    for first in range(0, total, most):
        last = min(first + most, total)
        batches = []
        for at in range(first, last, places):  # as many on every rank: where windows run out, by one that counts nothing
            begin = at + mesh.data_rank * size
            batch = micro_batch(windows, begin, max(min(size, last - begin), 0), depth, config.data.document_mask, device)
            counts += batch.valid_counts()
            nbytes += int(lengths[batch.tokens[:, 1 : 1 + batch.length][batch.valid(0)]].sum())
            batches.append(batch)
        with loads.of(batches) if loads is not None else nullcontext():
            executor.evaluate(batches, sums, step)
        if not go_on(last, total):
            return None
    counts = total_counts(mesh, counts).tolist()
    nbytes = int(total_counts(mesh, torch.tensor([nbytes], device=device)))
    depths, correct = total_sums(mesh, torch.cat((sums.depths, sums.correct.double()))).view(2, -1).tolist()
    losses, accuracy = (
        [total / count if count else 0.0 for total, count in zip(totals, counts)] for totals in (depths, correct)
    )
    return {
        "loss": losses[0],
        "loss_mtp": losses[1:],
        "accuracy": accuracy[0],
        "accuracy_mtp": accuracy[1:],
        "bits_per_byte": depths[0] / math.log(2) / nbytes if nbytes else None,
        "heldout_tokens": counts[0],
        "heldout_bytes": nbytes,
        "whole": total == len(windows),
    }


def micro_batch(windows, first: int, count: int, depth: int, document_mask: bool, device: torch.device) -> MicroBatch:
    """`count` windows from `first`; for 0 a window of padding, so that a rank without windows takes part in everything."""
    tokens, documents = (x.to(device) for x in windows.batch(first if count else 0, max(count, 1)))
    return MicroBatch(tokens, documents if count else torch.full_like(documents, -1), depth, document_mask)


class ExpertLoads:
    """Tokens that the routers of a whole model on one rank sent to each expert: `counts`, int64 [MoE layers, experts].

    MTP blocks come last. What a router makes of the padding behind the end of a text does not count.
    """

    def __init__(self, model: Model):
        self.model = model
        shape = len(model.routers), model.config.n_routed_experts
        self.counts = torch.zeros(shape, dtype=torch.int64, device=model.device)

    @contextmanager
    def of(self, batches: list[MicroBatch]) -> Iterator[None]:
        """Inside, the model runs these micro-batches forward, one after the other."""
        hooks = [
            router.register_forward_hook(self._hook(counts, iter(batches)))
            for counts, router in zip(self.counts, self.model.routers, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @staticmethod
    def _hook(counts: torch.Tensor, batches: Iterator[MicroBatch]) -> Callable[..., None]:
        def count(router, inputs, routing) -> None:
            batch = next(batches)
            real = batch.documents[:, : batch.length].flatten() >= 0
            counts.add_(torch.bincount(routing.topk_ids[real].flatten(), minlength=len(counts)))

        return count
