"""The small autograd graph of one compute phase of one micro-batch."""

from collections.abc import Callable

import torch


class Graph:
    """Detached inputs in, detached outputs out; the graph between them waits for one call of `backward`.

    keep=False runs without a graph, for evaluation, decoding and for what will be computed again.
    """

    def __init__(self, keep: bool):
        self.keep = keep

    def run(self, function: Callable, *inputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """function(*inputs) -> a tuple of tensors or Nones; returned detached."""
        if not self.keep:
            with torch.no_grad():
                return function(*inputs)
        self.inputs = tuple(x.detach().requires_grad_() for x in inputs)
        with torch.enable_grad():
            self.outputs = function(*self.inputs)
        return tuple(None if x is None else x.detach() for x in self.outputs)

    def backward(self, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the outputs (None: zero) -> gradients of the inputs. Frees the graph."""
        reached = [(x, grad) for x, grad in zip(self.outputs, grads, strict=True) if x is not None and grad is not None]
        torch.autograd.backward([x for x, _ in reached], [grad for _, grad in reached])
        input_grads = tuple(x.grad for x in self.inputs)
        self.inputs = self.outputs = None
        return input_grads
