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

from pipecompile.batching.microbatches import MiniBatch, ungather
from pipecompile.errors import InputError
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.input_gradients import input_gradients
from pipecompile.runtime.model_output import Outputs
from pipecompile.runtime.registers import Frame
from pipecompile.torch_private import pytree

__all__ = ["Call", "pipelined"]


@dataclass(slots=True)
class Call:
    """One forward that waits for its backward."""

    executable: Executable
    outputs: Outputs
    names: tuple[str, ...]
    batch: MiniBatch
    frame: Frame | None = None
    form: Any = None


def pipelined(call: Call) -> dict[str, Any]:
    """Run forward and return the outputs by name, attached to autograd."""
    tensors = [leaf for leaf in call.batch.whole.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    trigger = torch.empty(0, requires_grad=True)
    made = _Pipelined.apply(call, trigger, *tensors)
    found: dict[str, Any] = pytree.tree_unflatten(list(made), call.form)
    return found


class _Pipelined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *_tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            given = MiniBatch(call.batch.whole.detached(), call.batch.sizes).values
            arrivals = {(name, False): parts for name, parts in zip(call.names, given, strict=True)}
            frame = call.frame = call.executable.frame(call.batch.sizes, arrivals)
            call.executable.run(call.executable.halves[0], frame)
        call.executable.norms.settle()
        made = call.outputs.gathered(
            {name: frame.departures[name, False] for name in call.outputs.names}, call.batch.sizes
        )
        constant = [v for n, v in made.items() if not _wants_gradient(frame.departures[n, False])]
        ctx.mark_non_differentiable(*[v for v in pytree.tree_leaves(constant) if isinstance(v, torch.Tensor)])
        leaves, call.form = pytree.tree_flatten(made)
        return tuple(leaves)

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
        for name, gradient in pytree.tree_unflatten(list(gradients), call.form).items():
            parts, join = frame.departures[name, False], call.outputs.join_of(name)
            frame.arrivals[name, True] = ungather(gradient, parts, join, call.batch.sizes)
        call.executable.run(call.executable.halves[1], frame)
        found = zip(call.batch.whole.leaves, input_gradients(frame, call.names, call.batch), strict=True)
        wanted = [g for leaf, g in found if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        call.executable.finished(frame)
        return (None, None, *wanted)


def _wants_gradient(parts: Sequence[Any]) -> bool:
    return any(part.requires_grad for part in parts if isinstance(part, torch.Tensor))
