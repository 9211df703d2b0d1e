"""Forward and backward of a cell: one stage on one micro-batch. Each cell has an autograd graph of its own.

      received ──detach──► leaf ─► stage ─► out ──► sent          F
                            │                ▲
          sent ◄── gradient ┘                └── gradients        B, or I; then W for the weights

Parameters get their gradients as in any backward. One value of the program, `@stage#microbatch`, connects F with B: the leaves,
and the node of the graph at which the gradient of each output enters. The outputs themselves are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecompile.runtime.cells.divided_backward import DividedBackward
from pipecompile.runtime.cells.gradient_layouts import Layout, gradient_of, keep_layout
from pipecompile.runtime.cells.left_gradients import LeftGradients
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.autograd_engine import FunctionNode, accumulate, hooks_registered, other_users
from pipecompile.torch_private.modes import is_any_autocast_enabled
from pipecompile.torch_private.storages import storage_key

__all__ = [
    "Function",
    "InputGradients",
    "OutputGradients",
    "SavedGraph",
    "backward_cell",
    "edge_of",
    "forward_cell",
    "forward_with_graph",
    "input_cell",
    "make_leaves",
    "roots_of",
    "take_gradients",
    "then_add",
    "weight_cell",
]

Function = Callable[..., Sequence[Any]]
"""A stage: its inputs, and the number of samples if it needs that, to the tuple of its outputs."""

OutputGradients = Sequence[tuple[int, Sequence[int]]]
"""(output, registers of its gradients by falling consumer)."""

InputGradients = Sequence[tuple[int, int]]
"""(register, input whose gradient goes there)."""


@dataclass(slots=True)
class SavedGraph:
    """The autograd graph of a cell between F and B.

    leaves       per input, its leaf; None if the input requires no gradient
    edges        per output, where its gradient enters the graph; None if the output has no gradient
    has_hooks    the stage registered a hook on a tensor or a node while it ran
    left         the gradients of tensors that stages left on objects, if any (left_tensors.py)
    """

    leaves: list[torch.Tensor | None]
    edges: list[GradientEdge | None]
    has_hooks: bool
    left: LeftGradients | None = None


def forward_cell(
    stage: Function,
    inputs: Sequence[int],
    outputs: Sequence[int],
    saved: int | None,
    size_of: int | None,
    *,
    casts: bool,
) -> Run:
    """Return the function of an F. Inputs, outputs and `saved` are registers; without `saved` (inference) nothing is detached.

    `size_of` is the micro-batch whose size (samples) is the last argument, None for no size; `casts`: the stage has
    autocast regions.
    """
    known: set[Layout] = set()

    def forward(frame: Frame) -> None:
        registers = frame.registers
        values = [registers[index] for index in inputs]
        size = () if size_of is None else (frame.sizes[size_of],)
        if saved is None:
            results = stage(*values, *size)
        else:
            results, registers[saved] = forward_with_graph(stage, values, size, casts=casts, known=known)
        for index, value in zip(outputs, results, strict=True):
            registers[index] = value

    return forward


def forward_with_graph(
    stage: Function, values: list[Any], size: tuple[int, ...], *, casts: bool, known: set[Layout] | None = None
) -> tuple[Sequence[Any], SavedGraph]:
    """Run a stage on leaves made from `values`, which are replaced in place. Return the outputs and the graph.

    Gradients of leaves are kept as they come, but for layouts that are `known` to come in the strides of the leaf.
    """
    leaves = make_leaves(values, casts=casts)
    if known is not None:
        for place, leaf in enumerate(leaves):
            if leaf is not None:
                keep_layout(leaf, place, known)
    before = hooks_registered()
    results = stage(*values, *size)
    edges = [edge_of(value) if isinstance(value, torch.Tensor) and value.requires_grad else None for value in results]
    return results, SavedGraph(leaves, edges, hooks_registered() != before)


def make_leaves(values: list[Any], *, casts: bool) -> list[torch.Tensor | None]:
    """Replace values that require a gradient by leaves, in place. Return the leaf per value; None for other values.

    Autocast treats leaves as weights: it casts each once and caches the result. Therefore the stage gets views of the leaves.
    """
    leaves: list[torch.Tensor | None] = [None] * len(values)
    is_cast = casts or is_any_autocast_enabled()
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            leaf = leaves[place] = value.detach().requires_grad_()
            values[place] = leaf.view_as(leaf) if is_cast else leaf
    return leaves


def edge_of(output: torch.Tensor) -> GradientEdge | None:
    """Return where the gradient of an output enters the graph; None for a view made without grad, which leads to no node."""
    node = output.grad_fn
    if node is None:
        with torch.enable_grad():
            view_node = output.view_as(output).grad_fn
        if view_node is None or view_node.next_functions[0][0] is None:
            return None
    elif not isinstance(node, FunctionNode):
        return GradientEdge(node, output.output_nr)  # what `get_gradient_edge` returns, in half the time
    return get_gradient_edge(output)


def backward_cell(saved: int, gradients: OutputGradients, sent: InputGradients, unshared: Collection[int] = ()) -> Run:
    """Return the function of a B, or of an I that also does the work of W. `unshared` are inputs whose gradients nothing shares."""
    unshared = frozenset(unshared)

    def backward(frame: Frame) -> None:
        registers = frame.registers
        graph: SavedGraph = registers[saved]
        roots, root_gradients = roots_of(registers, graph, gradients)
        if roots:
            accumulate(roots, root_gradients)
        take_gradients(registers, graph, sent, root_gradients, unshared)

    return backward


def take_gradients(
    registers: list[Any],
    graph: SavedGraph,
    sent: InputGradients,
    received: Sequence[torch.Tensor],
    unshared: frozenset[int],
) -> None:
    """Write the gradients of inputs into their registers, after a backward from the gradients `received`."""
    for index, place in sent:
        leaf = graph.leaves[place]
        if leaf is None:
            registers[index] = None
        else:
            gradient = gradient_of(leaf)
            registers[index] = gradient if place in unshared else _own(gradient, received)


def input_cell(
    saved: int, gradients: OutputGradients, sent: InputGradients, remainder: int, divided: DividedBackward
) -> Run:
    """Return the function of an I; what remains for W goes into the register `remainder`."""

    def input_grad(frame: Frame) -> None:
        registers = frame.registers
        graph: SavedGraph = registers[saved]
        roots, root_gradients = roots_of(registers, graph, gradients)
        places = [place for place, leaf in enumerate(graph.leaves) if leaf is not None]
        leaves = [leaf for leaf in graph.leaves if leaf is not None]
        others = [] if graph.left is None else graph.left.leaves
        found, registers[remainder] = divided.input_half(
            [*leaves, *others], roots, root_gradients, has_hooks=graph.has_hooks
        )
        for leaf, gradient in zip(others, found[len(leaves) :], strict=True):
            leaf.grad = gradient
        gradient_of = dict(zip(places, found, strict=False))
        for index, place in sent:
            registers[index] = _own(gradient_of.get(place), root_gradients)

    return input_grad


def then_add(run: Run, added: Sequence[tuple[int, int]]) -> Run:
    """Return the function of a B or I whose gradients are added to those of later stages of the device: (register of these, own
    register) pairs.
    """
    if not added:
        return run

    def run_and_add(frame: Frame) -> None:
        run(frame)
        for pair in added:
            frame.registers[pair[1]] = _sum(frame.registers, pair)

    return run_and_add


def weight_cell(remainder: int, divided: DividedBackward) -> Run:
    """Return the function of a W."""

    def weight_grad(frame: Frame) -> None:
        divided.weight_half(frame.registers[remainder])

    return weight_grad


def _own(gradient: torch.Tensor | None, received: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a gradient in memory that nothing else writes: a copy if a tensor outside of `received` shares the memory.

    Of `leaf.view(4) + weight.view(4)` autograd makes two gradients in one memory. The next micro-batch adds to that of the weight.
    """
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        return gradient
    if not (count := other_users(gradient)):
        return gradient
    key = storage_key(gradient)
    same = sum(one.layout is torch.strided and storage_key(one) == key for one in received)
    return gradient.clone() if count > same else gradient


def roots_of(
    registers: list[Any], graph: SavedGraph, gradients: OutputGradients
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Return the edges of the outputs that got a gradient, and these gradients."""
    roots, root_gradients = [], []
    for output, indices in gradients:
        edge = graph.edges[output]
        gradient = registers[indices[0]] if len(indices) == 1 else _sum(registers, indices)
        if edge is not None and gradient is not None:
            roots.append(edge)
            root_gradients.append(gradient)
    for edge, gradient in () if graph.left is None else graph.left.roots():
        roots.append(edge)
        root_gradients.append(gradient)
    return roots, root_gradients


def _sum(registers: list[Any], indices: Sequence[int]) -> torch.Tensor | None:
    """Add the gradients of an output in the order of eager autograd: that of the last use first."""
    total = None
    for index in indices:
        gradient = registers[index]
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
