"""`pipe(x)` as one autograd function: its forward runs the forward half of a GPipe program, its backward the other half.

    x ──► forward half ──► y        y is an ordinary tensor with a grad_fn
    x.grad ◄── backward half ◄── dy parameters get their .grad as from any backward

The backward half runs inline on the calling autograd thread: a worker thread that called autograd on the same GPU would wait
for the calling thread for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.batching.merging import ungather
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.errors import InputError
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.results import Outputs, input_gradients
from pipecompile.torch_private import pytree

__all__ = ["PipelineCall", "run_with_autograd"]


@dataclass(slots=True)
class PipelineCall:
    """One forward and, later, its backward. `frame` is set in between; `spec` is the structure of the outputs by name."""

    executable: Executable
    outputs: Outputs
    names: tuple[str, ...]
    batch: MiniBatch
    frame: Frame | None = None
    spec: Any = None


def run_with_autograd(call: PipelineCall) -> dict[str, Any]:
    """Run the forward and return the outputs by name, attached to autograd."""
    tensors = [leaf for leaf in call.batch.whole.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    trigger = torch.empty(0, requires_grad=True)  # a backward is due also when only parameters require gradients
    leaves = _PipelinedCall.apply(call, trigger, *tensors)
    outputs: dict[str, Any] = pytree.tree_unflatten(list(leaves), call.spec)
    return outputs


class _PipelinedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: PipelineCall, *_tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            values = MiniBatch(call.batch.whole.detached(), call.batch.sizes).values
            arrivals = {(name, False): parts for name, parts in zip(call.names, values, strict=True)}
            frame = call.frame = call.executable.frame(call.batch.sizes, arrivals)
            call.executable.run(call.executable.halves[0], frame)
        call.executable.norms.settle()
        parts = {name: frame.departures[name, False] for name in call.outputs.names}
        gathered = call.outputs.gathered(parts, call.batch.sizes)
        constant = [value for name, value in gathered.items() if not _requires_grad(parts[name])]
        ctx.mark_non_differentiable(*[v for v in pytree.tree_leaves(constant) if isinstance(v, torch.Tensor)])
        leaves, call.spec = pytree.tree_flatten(gathered)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        call: PipelineCall = ctx.call
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
        for name, gradient in pytree.tree_unflatten(list(gradients), call.spec).items():
            parts, join = frame.departures[name, False], call.outputs.join_of(name)
            frame.arrivals[name, True] = ungather(gradient, parts, join, call.batch.sizes)
        call.executable.run(call.executable.halves[1], frame)
        pairs = zip(call.batch.whole.leaves, input_gradients(frame, call.names, call.batch), strict=True)
        requested = [g for leaf, g in pairs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        call.executable.finished(frame)
        return (None, None, *requested)


def _requires_grad(parts: Sequence[Any]) -> bool:
    return any(part.requires_grad for part in parts if isinstance(part, torch.Tensor))
