"""A captured stage: its forward and its backward for the micro-batches of one slot, as one operation of autograd.

    F   inputs ──copied──► static inputs ═ replay ═► static outputs ──copied──► registers
    B   gradients ──copied──► static gradients ═ replay ═► gradients of inputs, and of weights with hooks ──► autograd
                                                       └► sums of the gradients of weights, which are their `.grad`

"Static" tensors keep their addresses, which the graphs contain. Between F and B, what the backward needs lies in the memory
of the graphs. So a slot must not be replayed forward again before its backward; `generation` checks that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pipecompile.errors import InputError, text_of
from pipecompile.graph.backward_split import explore_backward
from pipecompile.runtime.cells.forward_backward import Function, edge_of
from pipecompile.runtime.cuda_graphs.capture import GraphCapture
from pipecompile.runtime.cuda_graphs.weight_aliases import WeightAliases
from pipecompile.runtime.cuda_graphs.weight_gradients import WeightGradients
from pipecompile.torch_private import pytree
from pipecompile.torch_private.autograd_engine import hooks_of_tensor
from pipecompile.torch_private.storages import foreach_copy

__all__ = ["CapturedBackward", "CapturedStage", "static_copy", "summary_of", "uncached_autocast", "write_static"]


class CapturedStage:
    """The graphs of one slot for inputs of one signature.

    inputs, outputs    static tensors
    edges              per output, where its gradient enters the captured autograd graph; None if it has no gradient
    leaves             leaves of that graph other than the inputs: aliases of weights
    weights            the weights, which get the gradients of the leaves
    owned              places of the weights that have aliases: their gradients are added inside the graph
    sums               the sums of these gradients, which all slots of the stage share
    generation         number of forward replays so far
    """

    def __init__(
        self,
        run: Function,
        capture: GraphCapture,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        refuse: Callable[[str], None],
        aliases: WeightAliases | None = None,
        sums: WeightGradients | None = None,
    ) -> None:
        self.capture, self.refuse, self.generation = capture, refuse, 0
        own = [static_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
        self.aliases, self.sums = aliases or WeightAliases(), sums or WeightGradients()
        with uncached_autocast(), self.aliases.in_place():
            result, self.replay = capture.capture(lambda: run(*pytree.tree_unflatten(own, spec)))
        self.output_leaves, self.output_spec = pytree.tree_flatten(result)
        self.outputs = [leaf for leaf in self.output_leaves if isinstance(leaf, torch.Tensor)]
        self.edges = [edge_of(output) if output.requires_grad else None for output in self.outputs]
        self.leaves = self._leaves()
        self.weights = [self.aliases.weight_of(leaf) for leaf in self.leaves]
        self.owned = [
            place for place, pair in enumerate(zip(self.weights, self.leaves, strict=True)) if pair[0] is not pair[1]
        ]
        self.captured_backward: CapturedBackward | None = None
        weakref.finalize(self, capture.drain)

    def _leaves(self) -> list[torch.Tensor]:
        nodes, _ = explore_backward([edge for edge in self.edges if edge is not None], frozenset())
        leaves = (getattr(node, "variable", None) for node in nodes)
        own = set(map(id, self.inputs))
        return [leaf for leaf in leaves if leaf is not None and id(leaf) not in own]

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs of the stage for the leaves of its inputs, in memory of the caller."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        needs_grad = any(edge is not None for edge in self.edges)
        outputs = iter(_Replay.apply(self, *tensors, *self.weights) if needs_grad else self.forward(tensors))
        result: Sequence[Any] = pytree.tree_unflatten(
            [next(outputs) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.output_leaves], self.output_spec
        )
        return result

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay F on these inputs."""
        write_static(self.inputs, inputs)
        self.generation += 1
        self.replay()
        return [output.detach().clone() for output in self.outputs]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replay B and return the gradients of the inputs and weights. The first B runs on the same memory, as a rehearsal; so do all
        if B cannot be captured.
        """
        which = tuple(gradient is not None for gradient in gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        if self.captured_backward is None:
            return self._first_backward(which, present)
        if self.captured_backward.which != which:
            raise InputError(
                "other outputs of a stage got gradients than when it was captured",
                why="a CUDA graph is for those alone",
                hint="compile(..., cuda_graphs=False)",
            )
        return self.captured_backward.run(present)

    def _first_backward(
        self, which: tuple[bool, ...], present: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Run B uncaptured, as a rehearsal, and return its gradients. Capture it then, unless the host waited for the device."""
        found, reason = self.capture.rehearse(lambda: self.gradients(which, present))
        try:
            if reason is None:
                captured = CapturedBackward(self, which, present)
                captured.capture_all()  # raises if the backward cannot be captured
                self.captured_backward = captured
        except Exception as error:
            reason = summary_of(error)
        if reason is not None:
            self.refuse(f"its backward: {reason}")
        return found

    def gradients(self, which: Sequence[bool], gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of inputs and weights by autograd, from the state that the last forward replay left."""
        edges = [edge for edge, is_given in zip(self.edges, which, strict=True) if is_given and edge is not None]
        tensors = (*self.inputs, *self.leaves)
        required = [tensor for tensor in tensors if tensor.requires_grad]
        with _without_hooks(self.leaves):
            found = iter(torch.autograd.grad(edges, required, gradients, retain_graph=True, allow_unused=True))
        return tuple(next(found) if tensor.requires_grad else None for tensor in tensors)


class CapturedBackward:
    """A captured backward of a stage whose forward was replayed just before.

    which               per output, whether it has a gradient
    output_gradients    static tensors for these gradients
    results             adds ──► gradients of inputs and weights, with values after a replay; None for those that are in the sums
    """

    def __init__(self, stage: CapturedStage, which: tuple[bool, ...], gradients: Sequence[torch.Tensor]) -> None:
        self.stage, self.which = stage, which
        self.output_gradients = [static_copy(gradient) for gradient in gradients]
        self.results: dict[bool, tuple[torch.Tensor | None, ...]] = {}
        self.replays: dict[bool, Callable[[], None]] = {}
        self._summed: tuple[int, ...] = ()
        for place in stage.owned:
            stage.sums.sum_of(stage.weights[place])

    def capture_all(self) -> None:
        """Capture the replay that overwrites the sums, and the one that adds to them if there are any.

        Both follow the forward that was captured: a later step may have written a copy of a tied weight, which autograd refuses.
        """
        for adds in (False, True):
            if not adds or self._summed:
                with uncached_autocast():
                    captured = self.stage.capture.capture(partial(self._gradients, adds=adds))
                self.results[adds], self.replays[adds] = captured

    def _gradients(self, *, adds: bool) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients, and those of owned weights into the sums."""
        stage, found = self.stage, list(self.stage.gradients(self.which, self.output_gradients))
        first = len(stage.inputs)
        self._summed = tuple(place for place in stage.owned if _is_like(found[first + place], stage.weights[place]))
        for place in self._summed:
            gradient, total = found[first + place], stage.sums.sum_of(stage.weights[place])
            assert gradient is not None
            total.add_(gradient) if adds else total.copy_(gradient)
            found[first + place] = None
        return tuple(found)

    def run(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Replay B for these gradients of the outputs. Return the gradients that autograd is to add."""
        write_static(self.output_gradients, gradients)
        stage, used = self.stage, False

        def replay_of(adds: bool) -> Callable[[], None]:
            nonlocal used
            used = adds
            return self.replays[adds]

        left = stage.sums.replay([stage.weights[place] for place in self._summed], replay_of)
        results = [*map(_released, (*stage.inputs, *stage.weights), self.results[used])]
        for place, gradient in zip(self._summed, left, strict=True):
            results[len(stage.inputs) + place] = gradient
        return results


def _is_like(gradient: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Return whether a gradient can be added in memory that is strided as the weight is."""
    return gradient is not None and gradient.layout is torch.strided and gradient.dtype == weight.dtype


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stage: CapturedStage, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = stage.forward(tensors[: len(stage.inputs)])
        ctx.stage, ctx.generation = stage, stage.generation
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, stage.edges, strict=True)
        ctx.mark_non_differentiable(*[output for output, edge in pairs if edge is None])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        assert ctx.generation == ctx.stage.generation, "a slot was used again before its backward"
        return None, *ctx.stage.backward(gradients)


@contextmanager
def _without_hooks(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Take the hooks off the weights: they run later, when autograd accumulates the gradients."""
    tables = [hooks for weight in weights if (hooks := hooks_of_tensor(weight))]
    before = [dict(hooks) for hooks in tables]
    for hooks in tables:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in zip(tables, before, strict=True):
            hooks.update(content)


def _released(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient in memory outside the graph; without a copy if it is only added to an existing `.grad`."""
    is_added = tensor.grad is not None and not hooks_of_tensor(tensor)
    return gradient if gradient is None or is_added else gradient.clone()


def static_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def write_static(static: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy through `.data`, which leaves version counters alone: autograd saved these tensors and must find the new values."""
    if static:
        foreach_copy([tensor.data for tensor in static], list(values))


class uncached_autocast:  # noqa: N801 used as a context, as a function is
    """Context in which autocast casts weights within the graph, instead of using casts from outside."""

    def __enter__(self) -> None:
        self.before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self.before)


def summary_of(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {text_of(error).strip().partition(chr(10))[0]}"
