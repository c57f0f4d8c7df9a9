"""AdamW (arXiv 1711.05101) on `main_grad`: masters and arithmetic in the main type, moments in BF16 or wider.

    m = β₁ m + (1 - β₁) g     v = β₂ v + (1 - β₂) g²
    θ = (1 - η λ) θ - η (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + ε)

State is flat: ranges of flattened tensors, here the whole of each. No decay on norms; the routing bias is no parameter.
"""

from dataclasses import dataclass

import torch
from torch import nn

from dstrain.config.schema import OptimConfig
from dstrain.precision import pointwise
from dstrain.precision.pointwise import kernel
from dstrain.precision.policy import Precision

# Elements updated at once. On the CPU a chunk and its temporaries stay in the cache, so that the state is read and
# written once; on a GPU a chunk only bounds the temporaries.
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}
ROW = 4096  # elements of a gradient whose norm is taken without leaving its type


@dataclass
class ParameterState:
    parameter: nn.Parameter
    master: torch.Tensor  # [numel] in the main type; the parameter's own storage where that has the type already
    exp_avg: torch.Tensor  # [numel]
    exp_avg_sq: torch.Tensor  # [numel]
    decay: bool

    @property
    def has_master(self) -> bool:
        return self.parameter.dtype != self.master.dtype


@kernel
def adamw_update(master, main_grad, exp_avg, exp_avg_sq, scalars):
    """In place, one range of a flattened parameter; the gradient is zero afterwards. scalars: see `AdamW.step`."""
    scale, keep1, beta2, keep2, shrink, step_size, correction2, eps = scalars.unbind()
    grad = main_grad * scale
    first = exp_avg.to(grad.dtype)
    first = first + (grad - first) * keep1
    second = exp_avg_sq.to(grad.dtype) * beta2 + grad * grad * keep2
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    master.copy_(master * shrink - first * step_size / ((second / correction2).sqrt() + eps))
    main_grad.zero_()


class AdamW:
    def __init__(self, model: nn.Module, config: OptimConfig, precision: Precision):
        self.config = config
        moments = torch.bfloat16 if config.moments == "bf16" else precision.main
        self.states: dict[str, ParameterState] = {}
        for name, parameter in model.named_parameters():
            flat = parameter.detach().view(-1)
            self.states[name] = ParameterState(
                parameter,
                flat if flat.dtype == precision.main else flat.to(precision.main),
                torch.zeros_like(flat, dtype=moments),
                torch.zeros_like(flat, dtype=moments),
                decay=parameter.ndim > 1,
            )

    def set_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter and its master from `value` (any float type, flat or shaped)."""
        state = self.states[name]
        state.master.copy_(value.reshape(-1))
        if state.has_master:
            state.parameter.detach().view(-1).copy_(state.master)

    def grad_norm(self) -> torch.Tensor:
        """The global L2 norm of every main_grad, a float64 scalar: rows of 4096 in the main type, their sum in FP64."""
        squares = []
        for state in self.states.values():
            flat = state.parameter.main_grad.view(-1)
            whole = len(flat) // ROW * ROW
            for rows in (flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)):
                squares.append(torch.linalg.vector_norm(rows, dim=1).double().square().sum())
        return torch.stack(squares).sum().sqrt()

    @torch.no_grad()
    def step(self, learning_rate: float, update: int, grad_scale: float) -> None:
        """One update, the `update`-th (from 1) that is applied; gradients are multiplied by grad_scale (the clip).

        Gradients are zero afterwards.
        """
        config = self.config
        correction1, correction2 = 1 - config.beta1**update, 1 - config.beta2**update
        numbers = [grad_scale, 1 - config.beta1, config.beta2, 1 - config.beta2, 0.0, learning_rate / correction1,
                   correction2, config.eps]
        for state in self.states.values():
            numbers[4] = 1 - learning_rate * config.weight_decay if state.decay else 1.0
            scalars = torch.tensor(numbers, dtype=state.master.dtype, device=state.master.device)
            weight = state.parameter.detach().view(-1)
            flats = (weight, state.master, state.parameter.main_grad.view(-1), state.exp_avg, state.exp_avg_sq)
            size = weight.numel() if pointwise.compiled else CHUNK[weight.device.type]
            for weight, master, *rest in zip(*(flat.split(size) for flat in flats)):
                adamw_update(master, *rest, scalars)
                if state.has_master:
                    weight.copy_(master)

    def zero_grad(self) -> None:
        for state in self.states.values():
            state.parameter.main_grad.zero_()
