"""Gradients that a loss reads, by `torch.autograd.grad` and hooks, of what earlier stages have made or use: refused where a part would lack.
So is a `backward` in a loss that will be recomputed, which would add to `.grad` twice.

    stage 0   w = map(z) ──► loss                          eager    d loss / d w goes through the image, all the way
    stage 1   half of the image, from w                    here     the graph of the last stage ends at its leaves:
    stage 2   the image, from the half and w ──► loss               what stage 1 computed from w would be missing

Only a loss whose code names `grad`, `register_hook` and the like is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from pipecompile.errors import InputError
from pipecompile.graph.stages import Stage
from pipecompile.torch_private import pytree
from pipecompile.tracing.loaded_names import names_in
from pipecompile.tracing.recompute_flag import is_first_of_two_runs
from pipecompile.tracing.state.function_state import functions_near

__all__ = ["SEPARATE_GRAPHS", "LossGradients"]

SEPARATE_GRAPHS = (
    "each stage has an autograd graph of its own, which does not lead from an output of one stage to that of another",
    "a single stage: compile(model, 1, ...); keep_together= the modules that it differentiates, in the last stage; or torch.autograd.grad in "
    "the forward of a module of the model, which is kept whole",
)
"""Why `torch.autograd.grad` of one output by another lacks something, and what to try."""


@dataclass(frozen=True, slots=True)
class LossGradients:
    """Sources that a loss may differentiate by: the stages, and the names of the values that the cell of the last one gets."""

    stages: Sequence[Stage]
    inputs: tuple[str, ...]

    @classmethod
    def of(
        cls, stages: Sequence[Stage], inputs: tuple[str, ...], loss_fn: Callable[..., Any] | None
    ) -> LossGradients | None:
        """Return the LossGradients of a loss; None if its code reads no gradients."""
        is_named = any(map(_names_grad, functions_near(loss_fn)))
        return cls(tuple(stages), inputs) if is_named else None

    def watched(self, losses: Callable[..., Any], leaves: Sequence[Any], given: Sequence[Any]) -> Callable[..., Any]:
        """Return the loss function that checks where it reads gradients.

        `leaves` are the values of the cell, `given` the same as the loss gets them.
        """

        def checked(*arguments: Any) -> Any:
            with _Watch(self, leaves, given):
                return losses(*arguments)

        return checked

    def torn(self, wanted: torch.Tensor, leaves: Sequence[Any], given: Sequence[Any]) -> set[int]:
        """Return the ids of the leaves that earlier stages have computed from a tensor that the loss differentiates by."""
        names = [name for name, value in zip(self.inputs, given, strict=False) if value is wanted]
        is_weight = isinstance(wanted, nn.Parameter)
        if not names and not is_weight:
            return set()
        computed = self._computed_from(set(names), wanted) - set(names)
        return {id(leaf) for name, leaf in zip(self.inputs, leaves, strict=False) if name in computed}

    def _computed_from(self, names: set[str], weight: torch.Tensor) -> set[str]:
        """Return the names, and those of the values that stages before the last compute from these values or from the weight."""
        for stage in self.stages[:-1]:
            graph = stage.module.graph
            results: Any = graph.output_node().args[0]
            made = list(zip(stage.outputs, results, strict=True))
            taken = zip(stage.inputs, graph.find_nodes(op="placeholder"), strict=False)
            reached = {node for name, node in (*made, *taken) if name in names}
            for node in graph.nodes:
                if not reached.isdisjoint(node.all_input_nodes) or _uses(stage.module, node, weight):
                    reached.add(node)
            names = names | {name for name, node in made if node in reached}
        return names


_BACKWARDS = frozenset({torch.autograd.backward, torch.Tensor.backward})
_OF_GRAPH = _BACKWARDS | {torch.autograd.grad}
_OF_TENSOR = frozenset({torch.Tensor.register_hook, torch.Tensor.retain_grad})
_NAMES = frozenset({"grad", "backward", "register_hook", "register_multi_grad_hook", "retain_grad"})


def _names_grad(function: FunctionType) -> bool:
    """Return whether code names what reads gradients, or loads `torch.autograd.grad` by another name."""
    names = names_in(function.__code__)
    return not names.isdisjoint(_NAMES) or any(function.__globals__.get(name) is torch.autograd.grad for name in names)


def _uses(module: fx.GraphModule, node: fx.Node, weight: torch.Tensor) -> bool:
    """Return whether a node reads a weight, or calls a layer that has it."""
    if node.op == "call_module":
        return any(one is weight for one in module.get_submodule(str(node.target)).parameters())
    return node.op == "get_attr" and _attribute(module, str(node.target)) is weight


def _attribute(module: nn.Module, target: str) -> Any:
    parent, _, name = target.rpartition(".")
    return getattr(module.get_submodule(parent), name, None)


class _Watch(TorchFunctionMode):
    """Raise InputError at a call whose gradients would lack what goes through earlier stages, or would be added twice."""

    def __init__(self, gradients: LossGradients, leaves: Sequence[Any], given: Sequence[Any]) -> None:
        super().__init__()
        self._gradients, self._leaves, self._given = gradients, leaves, given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check a call, and make it."""
        kwargs = kwargs or {}
        if func in _BACKWARDS and is_first_of_two_runs():
            raise InputError(
                f"the loss calls {func.__name__}(), and is recomputed",
                why="both runs would add to .grad",
                hint='checkpoint="never", or torch.autograd.grad in place of backward',
            )
        if func in _OF_GRAPH:
            outputs = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
            is_second = func is torch.autograd.grad and len(args) > 1
            self._require_whole(func, args[1] if is_second else kwargs.get("inputs"), outputs)
        elif func in _OF_TENSOR and not isinstance(args[0], nn.Parameter):
            self._require_whole(func, args[0])
        return func(*args, **kwargs)

    def _require_whole(self, func: Any, sources: Any, outputs: Any = None) -> None:
        """Raise InputError if other values of the cell come from the sources: those that the outputs lead to, if there are outputs."""
        wanted = [one for one in pytree.tree_leaves(sources) if isinstance(one, torch.Tensor)]
        torn = {leaf for one in wanted for leaf in self._gradients.torn(one, self._leaves, self._given)}
        ends = self._leaves if outputs is None else _leaves_of(pytree.tree_leaves(outputs)) if torn else ()
        if any(id(end) in torn and isinstance(end, torch.Tensor) and end.requires_grad for end in ends):
            raise InputError(
                f"{func.__name__}() in the loss would leave out the gradients of what earlier stages have computed from its tensor",
                why=SEPARATE_GRAPHS[0],
                hint=SEPARATE_GRAPHS[1],
            )


def _leaves_of(outputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the leaves of the autograd graph of some tensors."""
    waiting = [one.grad_fn for one in outputs if isinstance(one, torch.Tensor)]
    yield from (one for one in outputs if isinstance(one, torch.Tensor) and one.is_leaf)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        found = {following for following, _ in node.next_functions} - seen
        seen |= found
        waiting += found
