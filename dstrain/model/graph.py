"""The small autograd graph of one compute phase of one micro-batch."""

from collections.abc import Callable

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Graph:
    """Detached inputs in, detached outputs out; the graph between them waits for one call of `backward`.

    The graph itself holds neither: what stays in memory is what its functions saved for backward.
    keep=False runs without a graph, for evaluation, decoding and for what will be computed again.
    """

    def __init__(self, keep: bool):
        self.keep = keep

    def run(self, function: Callable, *inputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """function(*inputs) -> a tuple of tensors or Nones; returned detached."""
        if not self.keep:
            with torch.no_grad():
                return function(*inputs)
        self.input_grads: list[torch.Tensor | None] = [None] * len(inputs)
        stub = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            entered = [_Enter.apply(stub, x.detach(), self.input_grads, place) for place, x in enumerate(inputs)]
            outputs = function(*entered)
        self.edges: list[GradientEdge | None] = [
            get_gradient_edge(x) if x is not None and x.requires_grad else None for x in outputs
        ]
        return tuple(None if x is None else x.detach() for x in outputs)

    def backward(self, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the outputs (None: zero) -> gradients of the inputs. Frees the graph."""
        reached = [(edge, g) for edge, g in zip(self.edges, grads, strict=True) if edge is not None and g is not None]
        del self.edges
        torch.autograd.backward([edge for edge, _ in reached], [grad for _, grad in reached])
        input_grads = tuple(self.input_grads)
        del self.input_grads
        return input_grads


class _Enter(torch.autograd.Function):
    """An input of the graph as a node: a leaf tensor would be held by the graph for the sake of its `.grad`."""

    @staticmethod
    def forward(ctx, stub, x, grads, place):
        ctx.grads, ctx.place = grads, place
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.grads[ctx.place] = grad
        return None, None, None, None
