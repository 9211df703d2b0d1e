"""`pipe(x)` as one autograd function: its forward runs the forward half of a GPipe program, its backward the other half.

    x ──► forward half ──► y        y is an ordinary tensor with a grad_fn
    x.grad ◄── backward half ◄── dy parameters get their .grad as from any backward

A plain `backward` lets the stages add to `.grad`. Where parameters have hooks, or only some gradients are asked for (`torch.autograd.grad`,
`backward(inputs=)`), the gradients of all micro-batches are collected first and returned, so that autograd treats them as the model's.

The backward half runs inline on the calling autograd thread: a worker thread that called autograd on the same GPU would wait
for the calling thread forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipecompile.batching.merging import ungather
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.errors import InputError
from pipecompile.runtime.cells.left_places import gradients_refused
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.left_merge import left_merged
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.results import Outputs, input_gradients
from pipecompile.torch_private import pytree
from pipecompile.torch_private.autograd_engine import gradient_hook_tables, will_run

__all__ = ["PipelineCall", "run_with_autograd"]


class AutogradCall(Protocol):
    """One forward and, later, its backward. `frame` is set in between; `spec` is the structure of the results."""

    executable: Executable
    frame: Frame | None
    spec: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The inputs that require a gradient."""

    def begin(self) -> Frame:
        """Return a frame with detached inputs."""

    def left_merged(self) -> AbstractContextManager[None]:
        """Return the context of a forward, at whose end what micro-batches have left on the model is merged; by default nothing is."""
        return nullcontext()

    def results(self, frame: Frame) -> Any:
        """Return the results of a forward, a nested structure of tensors."""

    def constants(self, frame: Frame, results: Any) -> list[Any]:
        """Return the results that have no gradient."""

    def accept(self, frame: Frame, gradients: Any) -> None:
        """Take the gradients of the results, in their structure."""

    def input_gradients(self, frame: Frame) -> list[torch.Tensor | None]:
        """Return the gradient of each of the `tensors`, after a backward."""


@dataclass(slots=True)
class PipelineCall(AutogradCall):
    """A call on a mini-batch, whose results are values by name, put together from its micro-batches."""

    executable: Executable
    outputs: Outputs
    names: tuple[str, ...]
    batch: MiniBatch
    frame: Frame | None = None
    spec: Any = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.batch.whole.tensors if leaf.requires_grad]

    def begin(self) -> Frame:
        values = MiniBatch(self.batch.whole.detached(), self.batch.sizes).values
        arrivals = {(name, False): parts for name, parts in zip(self.names, values, strict=True)}
        return self.executable.frame(self.batch.sizes, arrivals)

    def left_merged(self) -> AbstractContextManager[None]:
        return left_merged(self.outputs.left, self.batch.sizes)

    def results(self, frame: Frame) -> dict[str, Any]:
        return self.outputs.gathered(self._parts(frame), self.batch.sizes)

    def _parts(self, frame: Frame) -> dict[str, Any]:
        return {name: frame.departures[name, False] for name in self.outputs.names}

    def constants(self, frame: Frame, results: Any) -> list[Any]:
        parts = self._parts(frame)
        return [value for name, value in results.items() if not _requires_grad(parts[name])]

    def accept(self, frame: Frame, gradients: Any) -> None:
        for name, gradient in gradients.items():
            parts, join = frame.departures[name, False], self.outputs.join_of(name)
            frame.arrivals[name, True] = ungather(gradient, parts, join, self.batch.sizes)

    def input_gradients(self, frame: Frame) -> list[torch.Tensor | None]:
        pairs = zip(self.batch.whole.leaves, input_gradients(frame, self.names, self.batch), strict=True)
        return [g for leaf, g in pairs if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def run_with_autograd(call: AutogradCall) -> Any:
    """Run the forward and return the results, attached to autograd.

    Raise InputError if a parameter is not a leaf: each stage's backward would continue into the graph that computed it, and free it.
    """
    trigger = torch.empty(0, requires_grad=True)  # a backward is due also when only parameters require gradients
    parameters = [own for own in call.executable.parameters if own.requires_grad]
    if not all(own.is_leaf for own in parameters):
        raise _computed(call.executable)
    leaves = _PipelinedCall.apply(call, parameters, trigger, *call.tensors, *parameters)
    return pytree.tree_unflatten(list(leaves), call.spec)


def _computed(executable: Executable) -> InputError:
    name = next(name for name, own in executable.graph.named_parameters() if own.requires_grad and not own.is_leaf)
    return InputError(
        f"the parameter {name!r} is computed from other tensors (functional_call with values that have a history)",
        why="each stage runs a backward of its own, which would go on into that computation, and free it for the next one",
        hint="leaves = {name: value.detach().requires_grad_() for name, value in values.items()} in functional_call; after the backward, "
        "torch.autograd.backward(list(values.values()), [leaves[name].grad for name in values]); or the model itself for this part",
    )


class _PipelinedCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: AutogradCall, parameters: Sequence[torch.Tensor], *_tensors: torch.Tensor
    ) -> tuple[Any, ...]:
        ctx.call, ctx.parameters = call, parameters
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            frame = call.frame = call.begin()
            with gradients_refused(call.executable.left_places), call.left_merged():
                call.executable.run(call.executable.halves[0], frame)
        call.executable.norms.settle()
        results = call.results(frame)
        constant = call.constants(frame, results)
        ctx.mark_non_differentiable(*[v for v in pytree.tree_leaves(constant) if isinstance(v, torch.Tensor)])
        leaves, call.spec = pytree.tree_flatten(results)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        call: AutogradCall = ctx.call
        if torch.is_grad_enabled():
            raise InputError(
                "a pipelined forward cannot be differentiated twice",
                why="create_graph=True asks for gradients of gradients",
                hint="use the model itself for the part that needs double backward",
            )
        if call.frame is None:
            raise InputError(
                "backward ran a second time through the same pipelined forward",
                why="all micro-batches of a call run their backward together",
                hint="one backward of the sum of all losses, or call the pipeline again before each backward",
            )
        frame, call.frame = call.frame, None
        call.accept(frame, pytree.tree_unflatten(list(gradients), call.spec))
        with _collected(ctx) as collected:
            call.executable.run(call.executable.halves[1], frame)
            requested = call.input_gradients(frame)
            call.executable.finished(frame)
        return (None, None, None, *requested, *collected)


@contextmanager
def _collected(ctx: Any) -> Iterator[list[torch.Tensor | None]]:
    """Yield a list that receives the gradients of the parameters at the end of the block, if autograd is to get them.

    In that case `.grad` and the hooks stay as they were. In a plain backward, which reaches the trigger, the stages add to `.grad`.
    """
    parameters, (trigger, _) = ctx.parameters, ctx.next_functions[0]
    collected: list[torch.Tensor | None] = [None] * len(parameters)
    tables = [table for own in parameters for table in gradient_hook_tables(own)]
    if not tables and will_run(trigger):
        yield collected
        return
    before, hooks = [own.grad for own in parameters], [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        for own in parameters:
            own.grad = None
        yield collected
        collected[:] = [own.grad for own in parameters]
    finally:
        for own, gradient in zip(parameters, before, strict=True):
            own.grad = gradient
        for table, entries in zip(tables, hooks, strict=True):
            table.update(entries)


def _requires_grad(parts: Sequence[Any]) -> bool:
    return any(part.requires_grad for part in parts if isinstance(part, torch.Tensor))
