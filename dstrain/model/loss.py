"""Cross-entropy as a sum over valid tokens, and the coefficients that turn sums into the loss of a global batch.

    L = L_main + λ Σ_k w_k L_k + α Σ_layers balance,   L_k = (sum over valid positions of depth k) / (their global count)
"""

from dataclasses import dataclass

import torch
from torch import nn

from dstrain.model.batch import IGNORED
from dstrain.precision import gemm
from dstrain.precision.policy import at_least_fp32
from dstrain.precision.stand_in import on_cuda

CHUNK_ELEMENTS = 1 << 22  # logits held at once: on the CPU they should not leave its caches
CUDA_CHUNK_ELEMENTS = 1 << 27  # on a GPU every chunk costs four passes over the whole FP32 gradient of the projection


def chunk_rows(vocab_size: int, cuda: bool) -> int:
    """Rows whose logits are held at once."""
    return max((CUDA_CHUNK_ELEMENTS if cuda else CHUNK_ELEMENTS) // vocab_size, 128)


def head_loss(state: torch.Tensor, weight: nn.Parameter, targets: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Projection and cross-entropy without ever holding all logits. -> the summed loss, a float64 scalar.

    state [rows, hidden], weight [vocab, hidden], targets int64 [rows] or IGNORED. coefficient: what this sum weighs in
    the loss, known before the forward pass. While a chunk's logits are at hand its gradients are computed too: the
    weight's goes to `main_grad` at once, the state's is given back by `backward`, which therefore takes 1 for the
    gradient of the returned sum.
    """
    return _HeadLoss.apply(state, weight, targets, coefficient)


def head_scores(
    state: torch.Tensor, weight: nn.Parameter, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `head_loss`, without gradients. -> the summed loss, a float64 scalar, and how often the target is the best guess.

    That is the id of the largest logit, the lowest of equal ones, as greedy decoding takes it. An int64 scalar.
    """
    rows = chunk_rows(weight.shape[0], on_cuda(weight))
    losses, correct = [], []
    for part, ids in zip(state.split(rows), targets.split(rows)):
        log_probs, summed = _cross_entropy(part, weight, ids)
        losses.append(summed)
        correct.append((log_probs.argmax(dim=-1) == ids).sum())
    return torch.stack(losses).sum(), torch.stack(correct).sum()


def _cross_entropy(
    state: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> log-probabilities [rows, vocab], at least FP32, and the summed loss in float64."""
    log_probs = at_least_fp32(project(state, weight)).log_softmax(dim=-1)
    losses = -log_probs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return log_probs, losses.masked_fill(targets == IGNORED, 0).double().sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, weight, targets, coefficient):
        rows = chunk_rows(weight.shape[0], on_cuda(weight))
        grad_state = torch.empty_like(state)
        losses = []
        for first in range(0, len(state), rows):
            part, ids = state[first : first + rows], targets[first : first + rows]
            log_probs, summed = _cross_entropy(part, weight, ids)
            losses.append(summed)
            places, ignored = ids.clamp_min(0).unsqueeze(-1), ids == IGNORED
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(-1, places, grad_logits.new_full(places.shape, -1.0))
            scale = grad_logits.new_full(ids.shape, coefficient).masked_fill_(ignored, 0)
            grad_logits = grad_logits.mul_(scale.unsqueeze(-1)).to(weight.dtype)
            grad_state[first : first + rows] = gemm.dgrad(grad_logits, weight)
            gemm.wgrad(grad_logits, part, weight.main_grad)
        ctx.grad_state = grad_state
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.grad_state, None, None, None


def project(state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits of some rows."""
    return gemm.fprop(state, weight)


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
    """Sums over micro-batches: cross-entropy at each depth, and the balance loss, in float64.

    correct: int64, targets at each depth that have the largest logit; counted in evaluation alone.
    """

    def __init__(self, depth: int, device: torch.device):
        self.depths = torch.zeros(depth + 1, dtype=torch.float64, device=device)
        self.balance = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros(depth + 1, dtype=torch.int64, device=device)
