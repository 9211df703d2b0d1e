"""The backward of a cell in two halves: I computes the gradients of its inputs, W those of its weights.

    I   autograd.grad(outputs ─► inputs, forks, early weights)     keeps the gradient at each fork for W
    W   backward(each fork ─► its weights)                         from the forks, not from the outputs again

Saved tensors that only I needs are freed at its end: they are taken out of the graph, which lives on until W. Where the graph cannot
be divided without computing something twice (`graph/backward_split.py`), I runs the whole backward and W does nothing. The same
holds if the stage's forward registered a hook on a tensor or a node: with forks the hook would run twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from pipecompile.graph.backward_split import (
    MIN_WEIGHT_FLOPS,
    BackwardDivision,
    Structure,
    divide_backward,
    explore_backward,
)
from pipecompile.runtime.cells.gradient_layouts import gradient_of
from pipecompile.torch_private.autograd_engine import accumulate, hooks_of_tensor, raw_saved_names, unpacked_name

__all__ = ["DividedBackward", "Remainder", "run_division"]

Gradients = list[torch.Tensor | None]


@dataclass(slots=True)
class Remainder:
    """Work that I leaves to W: (fork, its gradient, its weights) triples, and roots that lead to weights alone, with their gradients."""

    forks: list[tuple[GradientEdge, torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)


class DividedBackward:
    """Divisions of the autograd graphs of one stage.

    Micro-batches have graphs of the same structure, so each structure is divided once. Where a division gained nothing for
    inputs of some shapes, I runs the whole backward for these shapes from then on, without exploring the graph.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.least = MIN_WEIGHT_FLOPS.get(device_type, MIN_WEIGHT_FLOPS["cuda"])
        self._divisions: dict[Structure, BackwardDivision] = {}
        self._undivided: set[tuple[torch.Size, ...]] = set()

    def input_half(
        self,
        leaves: Sequence[torch.Tensor],
        roots: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        *,
        has_hooks: bool,
    ) -> tuple[Gradients, Remainder]:
        """Run I. Return the gradients of `leaves`, the inputs that require one, and what remains for W."""
        shapes = tuple([leaf.shape for leaf in leaves])
        if has_hooks or shapes in self._undivided:
            return _whole(leaves, roots, gradients), Remainder()
        if not leaves:
            return [], Remainder(roots=[*roots], gradients=[*gradients])
        nodes, structure = explore_backward(roots, frozenset(map(id, leaves)))
        division = self._divisions.get(structure)
        if division is None:
            division = self._divisions[structure] = divide_backward(nodes, structure, self.least)
        if division.is_whole:
            self._undivided.add(shapes)
        if division.is_whole or any(hooks_of_tensor(nodes[index].variable) for index in division.early):
            return _whole(leaves, roots, gradients), Remainder()
        return run_division(division, nodes, leaves, list(zip(roots, gradients, strict=True)))

    @staticmethod
    def weight_half(remainder: Remainder) -> None:
        """Run W. Each fork has a backward of its own, since a backward from one fork may pass through another."""
        for fork, gradient, weights in remainder.forks:
            accumulate([fork], [gradient], weights)
        if remainder.roots:
            accumulate(remainder.roots, remainder.gradients)


def _whole(
    leaves: Sequence[torch.Tensor], roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]
) -> Gradients:
    if roots:
        accumulate(roots, gradients)
    return [gradient_of(leaf) for leaf in leaves]


def run_division(
    division: BackwardDivision,
    nodes: Sequence[Any],
    leaves: Sequence[torch.Tensor],
    pairs: Sequence[tuple[GradientEdge, torch.Tensor]],
) -> tuple[Gradients, Remainder]:
    """Run I by a division; `pairs` are (root, its gradient)."""
    outer = {nodes[index] for index in division.outer}
    left = [(root, gradient) for root, gradient in pairs if root.node in outer]
    remainder = Remainder(roots=[root for root, _ in left], gradients=[gradient for _, gradient in left])
    inner = [(root, gradient) for root, gradient in pairs if root.node not in outer]
    if not inner:
        return [None] * len(leaves), remainder
    early = [nodes[index] for index in division.early]
    forks = [GradientEdge(nodes[fork], 0, None) for fork, _ in division.forks]
    spent = _taken_out([nodes[index] for index in division.spent])
    found = torch.autograd.grad(
        [root for root, _ in inner],
        [*leaves, *forks, *(accumulator.variable for accumulator in early)],
        [gradient for _, gradient in inner],
        retain_graph=True,
        allow_unused=True,
    )
    spent.clear()
    for leaf in leaves:
        gradient_of(leaf)  # which forgets it
    at_forks, at_early = found[len(leaves) : len(leaves) + len(forks)], found[len(leaves) + len(forks) :]
    _add(early, at_early)
    for fork, gradient, (_, weights) in zip(forks, at_forks, division.forks, strict=True):
        if gradient is not None:
            remainder.forks.append((fork, gradient, [nodes[index].variable for index in weights]))
    return list(found[: len(leaves)]), remainder


def _add(accumulators: Iterable[Node], gradients: Iterable[torch.Tensor | None]) -> None:
    """Add gradients through the weights' AccumulateGrad nodes, so that hooks that run after accumulation do run."""
    pairs = [(GradientEdge(a, 0, None), g) for a, g in zip(accumulators, gradients, strict=True) if g is not None]
    if pairs:
        accumulate([edge for edge, _ in pairs], [gradient for _, gradient in pairs])


def _taken_out(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """Move the tensors that these nodes saved into a list, from which the graph reads them: clearing the list frees them.

    Saved tensors that are packed by another hook stay where they are. So do weights, which live anyway.
    """
    shelf: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        shelf.append(tensor)
        return len(shelf) - 1

    for node in nodes:
        for raw, unpacked in _saved_names(node):
            value: Any = getattr(node, raw)
            for saved in value if isinstance(value, tuple) else (value,):
                if _is_worth_freeing(saved.data) and saved.unpack_hook is None:
                    getattr(
                        node, unpacked
                    )  # raises if the tensor was written in place meanwhile; a hook would hide that
                    saved.register_hooks(pack, shelf.__getitem__)
    return shelf


def _is_worth_freeing(saved: Any) -> bool:
    return isinstance(saved, torch.Tensor) and saved.dim() > 0 and not isinstance(saved, torch.nn.Parameter)


_NAMES: dict[type, tuple[tuple[str, str], ...]] = {}


def _saved_names(node: Node) -> tuple[tuple[str, str], ...]:
    """Return (raw, unpacked) names of the attributes that hold what a node saved."""
    kind = type(node)
    if kind not in _NAMES:
        _NAMES[kind] = tuple((name, unpacked_name(name)) for name in raw_saved_names(node))
    return _NAMES[kind]
