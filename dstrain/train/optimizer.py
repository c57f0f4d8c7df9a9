"""AdamW (arXiv 1711.05101) on `main_grad`: masters and arithmetic in the main type, moments in BF16 or wider.

    m = β₁ m + (1 - β₁) g     v = β₂ v + (1 - β₂) g²
    θ = (1 - η λ) θ - η (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + ε)

State is flat: ranges of flattened tensors. Each rank of a parameter's replica group keeps and updates one range of it
(ZeRO-1, see parallel/zero.py); a rank alone in its group has the whole. No decay on norms; the routing bias is no
parameter.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from dstrain.config.schema import OptimConfig
from dstrain.model.model import Model
from dstrain.parallel.buckets import BUCKET, Bucket, Slot, lay_out
from dstrain.parallel.mesh import Mesh
from dstrain.parallel.replicas import Replicas
from dstrain.parallel.zero import GradientReduction, start_gather
from dstrain.precision import pointwise
from dstrain.precision.fp8_linear import weights_were_written
from dstrain.precision.pointwise import kernel
from dstrain.precision.policy import Precision
from dstrain.precision.stand_in import kind

# Elements updated at once. On the CPU a chunk and its temporaries stay in the cache, so that the state is read and
# written once; on a GPU a chunk only bounds the temporaries.
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}
ROW = 4096  # elements of a gradient whose norm is taken without leaving its type


@dataclass
class ParameterState:
    """A parameter, and the range of it that this rank updates: n elements, 0 where other ranks update all of it."""

    parameter: nn.Parameter
    first: int  # where the range begins in the flattened parameter
    weight: torch.Tensor  # [n] of the parameter itself
    grad: torch.Tensor  # [n] of its main_grad
    master: torch.Tensor  # [n] in the main type; `weight` itself where that has the type already
    exp_avg: torch.Tensor  # [n]
    exp_avg_sq: torch.Tensor  # [n]
    decay: bool

    @property
    def has_master(self) -> bool:
        return self.parameter.dtype != self.master.dtype

    @property
    def end(self) -> int:
        return self.first + self.weight.numel()


@kernel
def adamw_update(weight, master, main_grad, exp_avg, exp_avg_sq, scalars):
    """In place, one range of a flattened parameter; the gradient is zero afterwards. weight: the master's copy in the
    compute type, None where it is the master itself. scalars: see `AdamW.step`."""
    scale, keep1, beta2, keep2, shrink, step_size, correction2, eps = scalars.unbind()
    grad = main_grad * scale
    first = exp_avg.to(grad.dtype)
    first = first + (grad - first) * keep1
    second = exp_avg_sq.to(grad.dtype) * beta2 + grad * grad * keep2
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    updated = master * shrink - first * step_size / ((second / correction2).sqrt() + eps)
    master.copy_(updated)
    if weight is not None:
        weight.copy_(updated)
    main_grad.zero_()


class AdamW:
    """The optimizer state of one rank, and the steps that all ranks take together."""

    def __init__(
        self,
        model: Model,
        config: OptimConfig,
        precision: Precision,
        replicas: Replicas | None = None,
        bucket: int = BUCKET,
    ):
        """Moves the model's parameters and main_grads into buckets of about `bucket` elements.

        replicas: who holds what, connected; None: this process is alone. All ranks must build theirs together.
        """
        self.config = config
        self.replicas = Replicas(Mesh(1, 0), model.config) if replicas is None else replicas
        self.buckets = lay_out(model.named_parameters(), self.replicas, precision.main, bucket)
        self.reduction = GradientReduction(self.buckets)
        moments = torch.bfloat16 if config.moments == "bf16" else precision.main
        states = {}
        for part in self.buckets:
            own = part.weights[part.first : part.end]
            master = own if own.dtype == precision.main else own.to(precision.main)
            exp_avg, exp_avg_sq = (torch.zeros_like(own, dtype=moments) for _ in range(2))
            for slot in part.slots:
                states[slot.name] = _state(part, slot, master, exp_avg, exp_avg_sq)
        self.states: dict[str, ParameterState] = {name: states[name] for name, _ in model.named_parameters()}

    def set_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter and this rank's range of its master from `value` (any float type, flat or shaped, whole)."""
        state = self.states[name]
        flat = value.reshape(-1)
        state.master.copy_(flat[state.first : state.end])
        if state.has_master:
            flat = flat.to(state.master.dtype)  # the same roundings as from the master
        state.parameter.detach().view(-1).copy_(flat)

    def ready(self, names: Iterable[str]) -> None:
        """These parameters' gradients are complete for this step: their reduction may start. See GradientReduction."""
        self.reduction.ready(names)

    def grad_norm(self) -> torch.Tensor:
        """The global L2 norm of every main_grad, a float64 scalar: rows of 4096 in the main type, their sum in FP64.

        Finishes the reduction over replicas first, so it ends the backward passes of a step. Each element is counted
        once in the world, by the rank that updates it; every rank gets the same bits.
        """
        self.reduction.finish()
        squares = []
        for state in self.states.values():
            flat = state.grad
            whole = len(flat) // ROW * ROW
            for rows in (flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)):
                squares.append(torch.linalg.vector_norm(rows, dim=1).double().square().sum())
        local = torch.stack(squares).sum()
        return self.replicas.mesh.world_group.total(local.view(1), "the gradient norm")[0].sqrt()

    @torch.no_grad()
    def step(self, learning_rate: float, update: int, grad_scale: float) -> None:
        """One update, the `update`-th (from 1) that is applied; gradients are multiplied by grad_scale (the clip).

        Afterwards gradients are zero and every rank has the new weights.
        """
        self.reduction.finish()
        config = self.config
        correction1, correction2 = 1 - config.beta1**update, 1 - config.beta2**update
        numbers = [grad_scale, 1 - config.beta1, config.beta2, 1 - config.beta2, 0.0, learning_rate / correction1,
                   correction2, config.eps]
        gathers = []
        for bucket in self.buckets:
            for slot in bucket.slots:
                state = self.states[slot.name]
                numbers[4] = 1 - learning_rate * config.weight_decay if state.decay else 1.0
                self._update(state, torch.tensor(numbers, dtype=state.master.dtype, device=state.master.device))
            gathers.append(start_gather(bucket))
            bucket.zero_rest()
        for gather in gathers:
            gather.wait()
        weights_were_written()  # into the buckets, which the parameters' version counters do not see
        self.reduction.reset()

    def _update(self, state: ParameterState, scalars: torch.Tensor) -> None:
        if not state.weight.numel():
            return
        flats = (state.weight, state.master, state.grad, state.exp_avg, state.exp_avg_sq)
        size = state.weight.numel() if pointwise.compiled else CHUNK[kind(state.weight.device)]
        for weight, master, *rest in zip(*(flat.split(size) for flat in flats)):
            adamw_update(weight if state.has_master else None, master, *rest, scalars)

    def zero_grad(self) -> None:
        """Throw the step's gradients away, of a step that is skipped."""
        self.reduction.finish()
        for bucket in self.buckets:
            bucket.grads.zero_()
        self.reduction.reset()


def _state(bucket: Bucket, slot: Slot, master, exp_avg, exp_avg_sq) -> ParameterState:
    """master, exp_avg, exp_avg_sq: of the whole part of the bucket that this rank owns."""
    first, end = bucket.owned(slot)
    owned = slice(first - bucket.first, end - bucket.first)
    return ParameterState(
        slot.parameter, first - slot.begin, bucket.weights[first:end], bucket.grads[first:end],
        master[owned], exp_avg[owned], exp_avg_sq[owned], decay=slot.parameter.ndim > 1,
    )
