"""`pipe(x)` as one autograd function: its forward runs the forward half of a GPipe program, its backward the other half.

    x ──► forward half ──► y        y is an ordinary tensor with a grad_fn
    x.grad ◄── backward half ◄── dy parameters get their .grad as from any backward

The backward half runs inline on the calling autograd thread: a worker that called autograd on the same GPU would wait
behind this thread for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.errors import InputError
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.frame import Frame
from pipecompile.runtime.gradients import input_gradient
from pipecompile.runtime.microbatch import scatter, ungather
from pipecompile.runtime.outputs import Outputs
from pipecompile.tracing.inputs.flat import FlatInputs

__all__ = ["Call", "pipelined"]


@dataclass(slots=True)
class Call:
    """One forward that waits for its backward."""

    executable: Executable
    outputs: Outputs
    names: tuple[str, ...]
    inputs: FlatInputs
    sizes: tuple[int, ...]
    frame: Frame | None = None


def pipelined(call: Call) -> dict[str, Any]:
    """Run forward and return the outputs by name, attached to autograd."""
    tensors = [leaf for leaf in call.inputs.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    trigger = torch.empty(0, requires_grad=True)
    made = _Pipelined.apply(call, trigger, *tensors)
    return dict(zip(call.outputs.names, made, strict=True))


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *_tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            arrivals = {
                (n, False): scatter(_detached(leaf), dim, len(call.sizes))
                for n, leaf, dim in zip(call.names, call.inputs.leaves, call.inputs.dims, strict=True)
            }
            frame = call.frame = call.executable.frame(call.sizes, arrivals)
            call.executable.run(call.executable.halves[0], frame)
        made = call.outputs.gathered({name: frame.departures[name, False] for name in call.outputs.names}, call.sizes)
        constant = [v for n, v in made.items() if not _wants_gradient(frame.departures[n, False])]
        ctx.mark_non_differentiable(*[value for value in constant if isinstance(value, torch.Tensor)])
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        if torch.is_grad_enabled():
            raise InputError(
                "a pipelined forward cannot be differentiated twice",
                why="create_graph=True asks for gradients of gradients",
                hint="use the model itself for the part that needs double backward",
            )
        if call.frame is None:
            raise InputError(
                "backward ran a second time through the same pipelined forward",
                hint="call pipe(x) again before each backward",
            )
        frame, call.frame = call.frame, None
        for name, gradient in zip(call.outputs.names, gradients, strict=True):
            parts, join = frame.departures[name, False], call.outputs.joins[name]
            frame.arrivals[name, True] = ungather(gradient, parts, join, call.sizes)
        call.executable.run(call.executable.halves[1], frame)
        found = [
            input_gradient(frame, name, leaf, dim)
            for name, leaf, dim in zip(call.names, call.inputs.leaves, call.inputs.dims, strict=True)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        call.executable.finished(frame)
        return (None, None, *found)


def _wants_gradient(parts: Sequence[Any]) -> bool:
    return any(part.requires_grad for part in parts if isinstance(part, torch.Tensor))


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
