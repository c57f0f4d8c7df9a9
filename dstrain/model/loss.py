"""Cross-entropy as a sum over valid tokens, and the coefficients that turn sums into the loss of a global batch.

    L = L_main + λ Σ_k w_k L_k + α Σ_layers balance,   L_k = (sum over valid positions of depth k) / (their global count)
"""

from dataclasses import dataclass

import torch

from dstrain.model.batch import IGNORED
from dstrain.precision.policy import at_least_fp32

ROWS_AT_ONCE = 1024  # bounds the FP32 copy of the logits


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab], targets int64 [rows] or IGNORED -> the summed loss, a float64 scalar."""
    return _CrossEntropySum.apply(logits, targets)


class _CrossEntropySum(torch.autograd.Function):
    """Keeps the logits in their own type and one log-sum a row."""

    @staticmethod
    def forward(ctx, logits, targets):
        log_sums, losses = [], []
        for rows, ids in zip(logits.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE)):
            wide = at_least_fp32(rows)
            log_sum = wide.logsumexp(dim=-1)
            picked = wide.gather(-1, ids.clamp_min(0).unsqueeze(-1)).squeeze(-1)
            losses.append((log_sum - picked).masked_fill(ids == IGNORED, 0).double().sum())
            log_sums.append(log_sum)
        ctx.save_for_backward(logits, targets, torch.cat(log_sums))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad):
        logits, targets, log_sums = ctx.saved_tensors
        out = torch.empty_like(logits)
        pieces = (x.split(ROWS_AT_ONCE) for x in (logits, targets, log_sums, out))
        for rows, ids, log_sum, piece in zip(*pieces):
            probs = (at_least_fp32(rows) - log_sum.unsqueeze(-1)).exp_()
            places = ids.clamp_min(0).unsqueeze(-1)
            probs.scatter_add_(-1, places, probs.new_full(places.shape, -1.0))
            scale = torch.where(ids == IGNORED, 0, grad.to(probs.dtype))
            piece.copy_(probs.mul_(scale.unsqueeze(-1)))
        return out, None


@dataclass
class LossWeights:
    """What each sum of a micro-batch weighs in the loss of the global batch."""

    depths: list[float]  # dLoss / d(summed cross-entropy) at depth 0 … D
    balance: float  # dLoss / d(balance sum)

    @classmethod
    def of_batch(
        cls, valid_counts: list[int], sequences: int, mtp_weight: float, depth_weights: list[float], alpha: float
    ) -> "LossWeights":
        """valid_counts: global, at depth 0 … D; sequences: of the global batch. A depth without positions weighs 0."""
        factors = [1.0] + [mtp_weight * weight for weight in depth_weights]
        depths = [factor / count if count else 0.0 for factor, count in zip(factors, valid_counts, strict=True)]
        return cls(depths, alpha / sequences)


class LossSums:
    """Sums over micro-batches: cross-entropy at each depth, and the balance loss, in float64."""

    def __init__(self, depth: int, device: torch.device):
        self.depths = torch.zeros(depth + 1, dtype=torch.float64, device=device)
        self.balance = torch.zeros((), dtype=torch.float64, device=device)
