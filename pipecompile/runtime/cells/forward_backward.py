"""What a device computes for one cell, a stage on a micro-batch. Each cell is a cut of its own in the autograd graph.

      received ──detach──► leaf ─► stage ─► out ──► sent          F
                            │                ▲
          sent ◄── gradient ┘                └── gradients        B, or I; then W for the weights

Parameters get their gradients as in any backward. What lies between forward and backward is one value of the program,
`@stage#microbatch`: the leaves, and where the graph of each output begins. Outputs themselves are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipecompile.runtime.cells.split_backward import DividedBackward, hooks_registered
from pipecompile.runtime.registers import Frame
from pipecompile.torch_private.autograd_engine import FunctionNode, accumulate
from pipecompile.torch_private.modes import is_any_autocast_enabled

__all__ = ["Run", "Saved", "attached", "backward_cell", "edge_of", "forward_cell", "input_cell", "weight_cell"]

Run = Callable[[Frame], None]

Gradients = Sequence[tuple[int, Sequence[int]]]
"""Per output, the registers of its gradients, the last consumer's first."""

Sent = Sequence[tuple[int, int]]
"""Per gradient of an input: its register, and which input."""


@dataclass(slots=True)
class Saved:
    """`leaves` are the inputs that want a gradient, `edges` the outputs that have one; None in the place of others."""

    leaves: list[torch.Tensor | None]
    edges: list[GradientEdge | None]
    is_hooked: bool


def forward_cell(
    stage: Callable[..., Sequence[Any]],
    inputs: Sequence[int],
    outputs: Sequence[int],
    saved: int | None,
    size_of: int | None,
    *,
    casts: bool,
) -> Run:
    """Run the stage on registers `inputs` into registers `outputs`; `saved` keeps what the backward needs.

    Without `saved` (inference) nothing is detached. `size_of` is the micro-batch whose size the stage takes, if it does;
    `casts`, whether it has autocast regions.
    """

    def forward(frame: Frame) -> None:
        registers = frame.registers
        values = [registers[index] for index in inputs]
        size = () if size_of is None else (frame.sizes[size_of],)
        if saved is None:
            made = stage(*values, *size)
        else:
            made, registers[saved] = attached(stage, values, size, casts=casts)
        for index, value in zip(outputs, made, strict=True):
            registers[index] = value

    return forward


def attached(
    stage: Callable[..., Sequence[Any]], values: list[Any], size: tuple[int, ...], *, casts: bool
) -> tuple[Sequence[Any], Saved]:
    """Run the stage on leaves of its own; the outputs, and what their backward needs.

    Autocast takes leaves for weights and casts them once, however often they are used: it is given views of them.
    """
    leaves: list[torch.Tensor | None] = [None] * len(values)
    is_cast = casts or is_any_autocast_enabled()
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            leaf = leaves[place] = value.detach().requires_grad_()
            values[place] = leaf.view_as(leaf) if is_cast else leaf
    before = hooks_registered()
    made = stage(*values, *size)
    edges = [edge_of(v) if isinstance(v, torch.Tensor) and v.requires_grad else None for v in made]
    return made, Saved(leaves, edges, hooks_registered() != before)


def edge_of(made: torch.Tensor) -> GradientEdge | None:
    """Where its gradient goes. A view made without gradients says that it requires them, and leads nowhere."""
    node = made.grad_fn
    if node is None:
        with torch.enable_grad():
            viewed = made.view_as(made).grad_fn
        if viewed is None or viewed.next_functions[0][0] is None:
            return None
    elif not isinstance(node, FunctionNode):
        return GradientEdge(node, made.output_nr)  # what `get_gradient_edge` makes, in half the time
    return get_gradient_edge(made)


def backward_cell(saved: int, gradients: Gradients, sent: Sent) -> Run:
    """B."""

    def backward(frame: Frame) -> None:
        registers = frame.registers
        kept: Saved = registers[saved]
        roots, given = _given(registers, kept, gradients)
        if roots:
            accumulate(roots, given)
        for index, position in sent:
            leaf = kept.leaves[position]
            registers[index] = None if leaf is None else leaf.grad

    return backward


def input_cell(saved: int, gradients: Gradients, sent: Sent, left: int, divided: DividedBackward) -> Run:
    """I. What is left for W goes into the register `left`."""

    def input_grad(frame: Frame) -> None:
        registers = frame.registers
        kept: Saved = registers[saved]
        roots, given = _given(registers, kept, gradients)
        places = [place for place, leaf in enumerate(kept.leaves) if leaf is not None]
        leaves = [leaf for leaf in kept.leaves if leaf is not None]
        found, registers[left] = divided.inward(leaves, roots, given, is_hooked=kept.is_hooked)
        gradient_of = dict(zip(places, found, strict=True))
        for index, position in sent:
            registers[index] = gradient_of.get(position)

    return input_grad


def weight_cell(left: int, divided: DividedBackward) -> Run:
    """W."""

    def weight_grad(frame: Frame) -> None:
        divided.outward(frame.registers[left])

    return weight_grad


def _given(registers: list[Any], kept: Saved, gradients: Gradients) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """The outputs that got a gradient, and these gradients."""
    roots, given = [], []
    for output, indices in gradients:
        root = kept.edges[output]
        if root is not None and (gradient := _sum(registers, indices)) is not None:
            roots.append(root)
            given.append(gradient)
    return roots, given


def _sum(registers: list[Any], indices: Sequence[int]) -> torch.Tensor | None:
    """In the order in which eager autograd adds: the last use first."""
    total = None
    for index in indices:
        gradient = registers[index]
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
