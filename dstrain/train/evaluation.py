"""Held-out loss and bits per byte."""

import math
from collections.abc import Callable

import numpy as np
import torch

from dstrain.config.schema import TrainConfig
from dstrain.model.batch import MicroBatch
from dstrain.model.block import Dispatcher
from dstrain.model.loss import LossSums
from dstrain.model.model import Model
from dstrain.model.units import evaluate


def evaluate_heldout(
    config: TrainConfig,
    model: Model,
    dispatcher: Dispatcher,
    windows,
    token_bytes: np.ndarray,
    sequences: int | None,
    go_on: Callable[[int, int], bool] = lambda done, total: True,
) -> dict | None:
    """Loss over the first `sequences` windows of the held-out text (None: all), without counting expert load.

    go_on(done, total) is called after every micro-batch; False ends the evaluation without a result.

    windows.batch(first, count) -> tokens, documents [count, L + 1 + D], len(windows). token_bytes: bytes of text that
    each id stands for. bits_per_byte = Σ -log2 p(token) / Σ bytes, over the same predicted tokens.
    """
    depth = config.model.num_nextn_predict_layers
    total = len(windows) if sequences is None else min(sequences, len(windows))
    device = model.device
    sums, counts, nbytes = LossSums(depth, device), torch.zeros(depth + 1, dtype=torch.int64, device=device), 0
    lengths = torch.from_numpy(np.asarray(token_bytes, dtype=np.int64)).to(device)
    size = config.batch.micro_sequences
    for first in range(0, total, size):
        tokens, documents = (x.to(device) for x in windows.batch(first, min(size, total - first)))
        batch = MicroBatch(tokens, documents, depth, config.data.document_mask)
        counts += batch.valid_counts()
        nbytes += int(lengths[batch.tokens[:, 1 : 1 + batch.length][batch.valid(0)]].sum())
        evaluate(model, batch, dispatcher, sums)
        if not go_on(min(first + size, total), total):
            return None
    losses = [s / c if c else 0.0 for s, c in zip(sums.depths.tolist(), counts.tolist())]
    return {
        "loss": losses[0],
        "loss_mtp": losses[1:],
        "bits_per_byte": sums.depths[0].item() / math.log(2) / nbytes if nbytes else None,
        "heldout_tokens": int(counts[0]),
        "heldout_bytes": nbytes,
        "whole": total == len(windows),
    }
