"""The gradients of tensors that stages left on objects and the loss has read (left_tensors.py), as the backward of a cell gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge

from pipecompile.torch_private.accelerators import is_accelerator

__all__ = ["LeftGradients", "LeftTensor"]


@dataclass(slots=True)
class LeftTensor:
    """A tensor that a forward has left: a reference to it, its values, where its gradient enters, and the leaf that the loss reads."""

    tensor: Callable[[], torch.Tensor | None]
    values: torch.Tensor
    edge: GradientEdge | None
    leaf: torch.Tensor | None = None

    def shown(self) -> torch.Tensor:
        """Return the tensor that the loss reads instead: a view of a new leaf if the tensor requires a gradient, as inputs of stages have."""
        if self.edge is None or not torch.is_grad_enabled():
            return self.values
        self.leaf = self.values.detach().requires_grad_()
        return self.leaf.view_as(self.leaf)


@dataclass(slots=True)
class LeftGradients:
    """Tensors at which the backward of a stage begins, and leaves whose gradients the backward of the last stage finds."""

    left: list[LeftTensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)

    def roots(self) -> Iterator[tuple[GradientEdge, torch.Tensor]]:
        """Yield the edges of the tensors that the loss has read, with their gradients.

        These were made on the stream of the last stage. Their memory is free for it when this stage has read them, too.
        """
        for one in self.left:
            if one.edge is not None and one.leaf is not None and (gradient := one.leaf.grad) is not None:
                device = one.values.device
                if is_accelerator(device) and gradient.device == device:
                    gradient.record_stream(torch.accelerator.current_stream(device))
                yield one.edge, gradient.to(device)
