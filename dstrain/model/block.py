"""The transformer block as four phases: attention, dispatch, experts, combine.

    attention   hidden -> residual, ffn_input x, topk_ids, topk_weights, balance loss          (compute)
    dispatch    x, ids, weights -> the rows of this rank's experts, their weights               (communication)
    experts     rows and x -> routed rows, shared expert's output                               (compute)
    combine     routed rows -> their sum per token + shared + residual = next hidden state      (communication)

A `BlockPass` is one micro-batch on its way through one block. Its compute phases take and return detached
tensors and keep a small graph each; communication phases have no graph but a mirror: dispatch backward is a
combine, combine backward is a dispatch. A communication phase only starts; the phase behind it waits for the result.
Whoever calls decides what runs in between.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn

from dstrain.config.schema import ModelConfig
from dstrain.model.attention import Attention, AttentionContext, LatentCache
from dstrain.model.experts import MLP, MoE
from dstrain.model.graph import Graph
from dstrain.model.router import Routing
from dstrain.precision.fp8_gemm import GemmBackend
from dstrain.precision.pointwise import RMSNorm
from dstrain.precision.policy import at_least_fp32


T = TypeVar("T", covariant=True)


class Pending(Protocol[T]):
    """A communication that was started."""

    def wait(self) -> T:
        """Its result, usable by what the caller runs next; called once."""


class Dispatch(Protocol):
    """The way of one micro-batch's tokens to the experts of one layer and back. Communication in compute type.

    Every method starts a communication; whoever needs the result waits for it.
    """

    offsets: torch.Tensor  # int32 [local experts]: where each expert's rows end; known once dispatch was waited for

    def ready(self) -> bool:
        """Whether `dispatch` would start its communication at once, without waiting for what `route` has started."""

    def dispatch(self, x: torch.Tensor, topk_weights: torch.Tensor) -> Pending[tuple[torch.Tensor, torch.Tensor]]:
        """x [T, hidden], topk_weights [T, k] -> rows [n, hidden] sorted by expert, row_weights [n]."""

    def combine(self, rows: torch.Tensor) -> Pending[torch.Tensor]:
        """rows [n, hidden] -> the plain sum of each token's rows, [T, hidden]."""

    def combine_backward(self, grad: torch.Tensor) -> Pending[torch.Tensor]:
        """grad [T, hidden] -> the gradient of each row, [n, hidden]."""

    def dispatch_backward(
        self, grad_rows: torch.Tensor, grad_row_weights: torch.Tensor
    ) -> Pending[tuple[torch.Tensor, torch.Tensor]]:
        """-> the gradients of x [T, hidden] and of topk_weights [T, k]."""


class Dispatcher(Protocol):
    def route(self, topk_ids: torch.Tensor, experts: int) -> Dispatch:
        """topk_ids int64 [T, k] -> the way for these tokens. Starts to tell other ranks how many come to them."""


class Block(nn.Module):
    """Pre-norm attention and FFN; dense or mixture of experts."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, experts: range, fp8: GemmBackend | None = None):
        """layer: its number in the whole model. experts: those whose weights are held."""
        super().__init__()
        self.config, self.layer, self.fp8 = config, layer, fp8
        self.is_moe = layer >= config.first_k_dense_replace
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype, fp8)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if self.is_moe:
            self.mlp = MoE(config, dtype, experts, fp8)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype, fp8)

    def attend(
        self, hidden: torch.Tensor, context: AttentionContext, cache: LatentCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor] | None]:
        """hidden [B, L, hidden] -> residual and the FFN's normalised input x, both [B, L, hidden].

        Last, in FP8, what computes x [B·L, hidden] once more: nobody keeps the output of a norm.
        """
        residual = hidden + self.self_attn(hidden, self.input_layernorm, context, cache)
        again = self.post_attention_layernorm.again(residual) if self.fp8 is not None else None
        return residual, self.post_attention_layernorm(residual), again

    def few(self, hidden: torch.Tensor, context: AttentionContext, cache: LatentCache) -> torch.Tensor:
        """All four phases of a few tokens that are being decoded, as one function to be compiled.

        hidden [B, L, hidden] -> the next hidden state. The model is frozen and holds every expert.
        """
        residual = hidden + self.self_attn(hidden, self.input_layernorm, context, cache)
        x = self.post_attention_layernorm(at_least_fp32(residual))  # in FP32, see `few_ffn`
        if not self.is_moe:
            return residual + self.mlp(x.to(hidden.dtype))
        routing: Routing = self.mlp.gate(x, count=False, balance=False)
        return residual + self.mlp.of_few(x, routing.topk_ids, routing.topk_weights)


class BlockPass:
    """One micro-batch through one block, phase by phase, forward and back."""

    def __init__(
        self,
        block: Block,
        context: AttentionContext,
        dispatcher: Dispatcher,
        *,
        train: bool = True,
        recompute: bool = False,
        cache: LatentCache | None = None,
    ):
        """train: keep graphs for backward and count the experts' load. recompute: keep only the input for it."""
        self.block, self.context, self.dispatcher, self.cache = block, context, dispatcher, cache
        self.count = train
        self.recompute = train and recompute
        self.keep = train and not recompute
        self.hidden = None  # the block's input, kept for recomputation

    # Forward ---------------------------------------------------------------------------------------------------

    def attention(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, L, hidden] -> the balance loss of this layer (a detached scalar; 0 for a dense block)."""
        if self.recompute:
            self.hidden = hidden
        self.attention_graph = Graph(self.keep)
        outputs = self.attention_graph.run(self._attention, hidden)
        self.residual, self.x, self.topk_weights, balance_loss = outputs
        if self.block.is_moe:
            self.route = self.dispatcher.route(self.topk_ids, self.block.config.n_routed_experts)
        return balance_loss

    def _attention(self, hidden):
        residual, x, self.x_again = self.block.attend(hidden, self.context, self.cache)
        if not self.block.is_moe:
            return residual, x, None, x.new_zeros((), dtype=torch.float32)
        # Nobody asks for the balance loss of a token that is being decoded.
        routing: Routing = self.block.mlp.gate(x, self.count, self.x_again, balance=self.cache is None)
        self.topk_ids = routing.topk_ids
        return residual, x, routing.topk_weights, routing.balance_loss

    def dispatch_is_ready(self) -> bool:
        """Behind attention: whether `dispatch` need not wait for anything before it starts."""
        return not self.block.is_moe or self.route.ready()

    def dispatch(self) -> None:
        if self.block.is_moe:
            self.pending = self.route.dispatch(self.x.flatten(0, 1), self.topk_weights)

    def experts(self) -> None:
        self.experts_graph = Graph(self.keep)
        if self.block.is_moe:
            rows, row_weights = self._wait()
            self.rows, self.ffn = self.experts_graph.run(self._experts, rows, row_weights, self.x)
        else:
            (self.ffn,) = self.experts_graph.run(lambda x: (self.block.mlp(x, self.x_again),), self.x)
        self.x = self.x_again = self.topk_weights = None

    def _experts(self, rows, row_weights, x):
        mlp = self.block.mlp
        shared = mlp.shared_experts(x, self.x_again) if mlp.shared_experts is not None else None
        return mlp.experts(rows, row_weights, self.route.offsets), shared

    def combine(self) -> None:
        if self.block.is_moe:
            self.pending = self.route.combine(self.rows)
        if self.ffn is not None:
            self.residual = self.residual + self.ffn
        self.ffn = None

    def output(self) -> torch.Tensor:
        """Behind combine: the next hidden state [B, L, hidden]."""
        hidden = self.residual
        if self.block.is_moe:
            hidden = hidden + self._wait().view_as(hidden)
        self.residual = self.rows = None
        return hidden

    def _wait(self):
        """The result of the communication that was started last."""
        result, self.pending = self.pending.wait(), None
        return result

    # Backward --------------------------------------------------------------------------------------------------

    def combine_backward(self, grad: torch.Tensor) -> None:
        """grad [B, L, hidden] of the next hidden state."""
        if self.recompute:
            self._run_again()
        self.grad = grad
        if self.block.is_moe:
            self.pending = self.route.combine_backward(grad.flatten(0, 1))

    def _run_again(self) -> None:
        """Recompute the phases before the combine, with graphs and without counting the load twice."""
        self.keep, self.count, self.recompute = True, False, False
        hidden, self.hidden = self.hidden, None
        self.attention(hidden)
        self.dispatch()
        self.experts()
        self.residual = self.ffn = self.rows = None

    def experts_backward(self) -> None:
        if self.block.is_moe:
            grads = self.experts_graph.backward(self._wait(), self.grad)
            self.grad_rows, self.grad_row_weights, self.grad_x = grads
        else:
            (self.grad_x,) = self.experts_graph.backward(self.grad)

    def dispatch_backward(self) -> None:
        if self.block.is_moe:
            self.pending = self.route.dispatch_backward(self.grad_rows, self.grad_row_weights)

    def attention_backward(self, balance_weight: torch.Tensor) -> torch.Tensor:
        """balance_weight: dLoss / d(balance loss), a scalar. -> the gradient of the block's input."""
        grad_topk_weights = None
        if self.block.is_moe:
            grad_x, grad_topk_weights = self._wait()
            grad_x = grad_x.view_as(self.grad)
            self.grad_x = grad_x if self.grad_x is None else grad_x + self.grad_x
            self.grad_rows = self.grad_row_weights = self.route = None
        (grad_hidden,) = self.attention_graph.backward(
            self.grad, self.grad_x, grad_topk_weights, balance_weight if self.block.is_moe else None
        )
        self.grad = self.grad_x = None
        return grad_hidden
