"""The router: which experts a token goes to and with what weight, the load it measures, and the balance loss.

Per token (arXiv 2412.19437 §2.1.2; REFERENCE §1): s = sigmoid or softmax of the gate's logits; selection uses
s + b, limited to the best groups; the mixing weights are the unbiased s of the selected experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.precision.linear import linear
from dstrain.precision.policy import at_least_fp32

SORTED = 1 << 14  # scores on a CPU below which a sort is the quickest


@dataclass
class Routing:
    topk_ids: torch.Tensor  # int64 [tokens, k]
    topk_weights: torch.Tensor  # at least FP32 [tokens, k]
    balance_loss: torch.Tensor  # scalar: the sum over the micro-batch's sequences of Σ_i f_i P_i; 0 where not asked for


class Router(nn.Module):
    """Deterministic routing per token; among equal scores the expert with the lower index wins."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.config = config
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=wide))
        if config.has_routing_bias:
            # Not a parameter: no gradient, no decay, no optimizer. FP32 whatever the model is cast to.
            bias = torch.zeros(config.n_routed_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("load", torch.zeros(config.n_routed_experts, dtype=torch.int64), persistent=False)

    def _apply(self, fn, recurse=True):
        bias = self._buffers.get("e_score_correction_bias")
        super()._apply(fn, recurse)
        if bias is not None and self.e_score_correction_bias.dtype != torch.float32:
            # A cast would lose the small steps of the bias: take the device of the result, not its type.
            self.e_score_correction_bias = bias.to(self.e_score_correction_bias.device)
        return self

    def forward(
        self, x: torch.Tensor, count: bool, again: Callable[[], torch.Tensor] | None = None, balance: bool = True
    ) -> Routing:
        """x [B, L, hidden] -> the routing of its B·L tokens. `count` adds them to `load`; balance: compute that loss.

        again: what computes x [B·L, hidden] once more, where it need not be kept.
        """
        config = self.config
        logits = linear(at_least_fp32(x), self.weight, again)
        scores = logits.sigmoid() if config.scoring_func == "sigmoid" else logits.softmax(dim=-1)
        topk_ids = self.select(scores.detach()).flatten(0, 1)
        topk_weights = scores.flatten(0, 1).gather(1, topk_ids)
        if config.norm_topk_prob:
            topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        if count:
            # Not bincount: on a GPU it asks the device for the largest id, and the host waits.
            self.load.scatter_add_(0, topk_ids.flatten(), torch.ones_like(topk_ids.flatten()))
        balance_loss = self.balance_loss(scores) if balance else scores.new_zeros(())
        return Routing(topk_ids, topk_weights * config.routed_scaling_factor, balance_loss)

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [..., experts] -> ids of the num_experts_per_tok selected, int64, best first."""
        config = self.config
        if config.has_routing_bias:
            scores = scores + self.e_score_correction_bias
        if config.topk_method != "greedy" and config.n_group > 1:
            groups = scores.unflatten(-1, (config.n_group, -1))  # [..., groups, experts of a group]
            if config.topk_method == "noaux_tc":
                group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
            else:
                group_scores = groups.amax(dim=-1)
            kept = best(group_scores, config.topk_group)
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
            # -inf, never 0: a biased score may be negative.
            scores = groups.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)
        return best(scores, config.num_experts_per_tok)

    def balance_loss(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [B, L, experts] -> Σ over sequences of Σ_i f_i P_i.

        f_i = E / (K L) · #tokens whose K best unbiased scores hold i;  P_i = mean over tokens of s_i / Σ_j s_j.
        """
        experts, k = self.config.n_routed_experts, self.config.num_experts_per_tok
        chosen = best(scores.detach(), k)  # [B, L, K]
        counts = torch.zeros_like(scores[:, 0]).scatter_add_(
            1, chosen.flatten(1), torch.ones_like(chosen.flatten(1), dtype=scores.dtype)
        )
        frequency = counts * (experts / (k * scores.shape[1]))
        share = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=1)
        return (frequency * share).sum()


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest along the last dimension, best first, ties to the lower index on every device."""
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or scores.numel() < SORTED:
        # contiguous: the rest of the order is not kept for as long as the choice is
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    # Of hundreds of experts a selection takes a fraction of a sort's time, but leaves ties to chance. So each score
    # becomes an integer of its own: its bits, in the order of their floats, and behind them the index.
    bits = (scores + 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32
    keys |= torch.arange(scores.shape[-1] - 1, -1, -1)
    return keys.topk(k, dim=-1).indices
