"""Small models with the oracle's random weights over a grid of architectures, and one pass through them."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from oracle import random_weights

from dstrain.config.schema import YarnConfig
from dstrain.model import loss
from dstrain.model.batch import MicroBatch
from dstrain.model.loss import LossSums, LossWeights
from dstrain.model.model import Model
from dstrain.model.units import forward_backward
from dstrain.parallel.dispatch import LocalDispatcher
from dstrain.precision.main_grad import attach_main_grads

YARN = YarnConfig(factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.707)
GRID = {
    "v3": {},
    "no-query-lora": {"q_lora_rank": None},
    "yarn": {"rope_scaling": YARN},
    "v2": {
        "topk_method": "group_limited_greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 16.0, "n_shared_experts": 2,
    },
    "greedy-one-group": {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"},
    "no-groups-bias": {"n_group": 1, "topk_group": 1},
    "depth-0": {"num_nextn_predict_layers": 0},
    "depth-weights": {"mtp_depth_weights": [0.7, 0.3]},
    "moonlight-eps": {"rms_norm_eps": 1e-5},
}
ALPHA, MTP_WEIGHT = 0.01, 0.3


def build(config, dtype, seed=3):
    """The model with the oracle's random weights, and those weights."""
    weights = random_weights(config, seed)
    model = Model(config, dtype)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights[name])
    attach_main_grads(model, dtype)
    return model, weights


def sample(config, sequences=2, length=16, seed=5):
    generator = torch.Generator().manual_seed(seed)
    width = length + 1 + config.num_nextn_predict_layers
    tokens = torch.randint(0, config.vocab_size, (sequences, width), generator=generator)
    documents = (torch.rand(sequences, width, generator=generator) < 0.2).long().cumsum(1)
    return tokens, documents


def run(model, config, tokens, documents, document_mask, recompute=False, alpha=ALPHA, dispatcher=None):
    depth = config.num_nextn_predict_layers
    batch = MicroBatch(tokens, documents, depth, document_mask)
    counts = batch.valid_counts().tolist()
    weights = LossWeights.of_batch(counts, len(tokens), MTP_WEIGHT, config.depth_weights, alpha)
    sums = LossSums(depth, torch.device("cpu"))
    forward_backward(model, batch, dispatcher or LocalDispatcher(), sums, weights, recompute)
    return sums, counts


@contextmanager
def caught_logits():
    """Inside, the logits [rows, vocab] of every head in the order they are computed: a list that fills."""
    caught, original = [], loss.project

    def project(*args):
        caught.append(original(*args).detach())
        return caught[-1]

    with patch.object(loss, "project", project):
        yield caught
