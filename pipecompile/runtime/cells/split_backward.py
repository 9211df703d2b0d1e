"""The backward of a cell in two: I computes the gradients of its inputs, W those of its weights.

    I   autograd.grad(outputs ─► inputs, forks, early weights)     the forks' own gradients are kept for W
    W   backward(each fork ─► its weights)                         from where I left off

What only I needs is freed when I is over: the tensors that its nodes saved are taken out of the graph, which lives on for W.
Where the graph cannot be divided without doing work twice (`forks.py` says where), I does it all and W nothing. So it is,
too, when the stage's forward registered a hook, on a tensor or on a node of the graph: going back to a fork would run it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from pipecompile.graph.backward_split import WORTH, Division, Structure, divide, explore
from pipecompile.torch_private.autograd_engine import accumulate, hooks_of_tensor, raw_saved_names, unpacked_name

__all__ = ["DividedBackward", "Left", "hooks_registered"]


def hooks_registered() -> int:
    """A count that grows with every hook that anybody registers."""
    return RemovableHandle.next_id


@dataclass(slots=True)
class Left:
    """What I leaves for W: forks with their gradients and weights, and roots with theirs."""

    forks: list[tuple[GradientEdge, torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)


class DividedBackward:
    """Divides the graphs of one stage. A graph looks the same for every micro-batch, so the division is made once; where
    inputs of these shapes had nothing to divide, I does it all from then on and does not look again.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.least = WORTH.get(device_type, WORTH["cuda"])
        self._known: dict[Structure, Division] = {}
        self._undivided: set[tuple[torch.Size, ...]] = set()

    def inward(
        self,
        leaves: Sequence[torch.Tensor],
        roots: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        *,
        is_hooked: bool,
    ) -> tuple[list[torch.Tensor | None], Left]:
        """I: the gradients of `leaves`, which are the inputs that want one, and what is left to do."""
        shapes = tuple([leaf.shape for leaf in leaves])
        if is_hooked or shapes in self._undivided:
            return _whole(leaves, roots, gradients), Left()
        if not leaves:
            return [], Left(roots=[*roots], gradients=[*gradients])
        nodes, structure = explore(roots, frozenset(map(id, leaves)))
        division = self._known.get(structure)
        if division is None:
            division = self._known[structure] = divide(nodes, structure, self.least)
        early = [nodes[index].variable for index in division.early]
        if division.is_whole:
            self._undivided.add(shapes)
        if division.is_whole or any(hooks_of_tensor(weight) for weight in early):
            return _whole(leaves, roots, gradients), Left()
        outer = {nodes[index] for index in division.outer}
        pairs = list(zip(roots, gradients, strict=True))
        left = Left(roots=[r for r, _ in pairs if r.node in outer], gradients=[g for r, g in pairs if r.node in outer])
        inner = [(root, gradient) for root, gradient in pairs if root.node not in outer]
        if not inner:
            return [None] * len(leaves), left
        forks = [GradientEdge(nodes[fork], 0, None) for fork, _ in division.forks]
        spent = _taken_out([nodes[index] for index in division.spent])
        found = torch.autograd.grad(
            [root for root, _ in inner],
            [*leaves, *forks, *early],
            [gradient for _, gradient in inner],
            retain_graph=True,
            allow_unused=True,
        )
        spent.clear()
        at_forks, at_early = found[len(leaves) : len(leaves) + len(forks)], found[len(leaves) + len(forks) :]
        _add(early, at_early)
        for fork, gradient, (_, weights) in zip(forks, at_forks, division.forks, strict=True):
            if gradient is not None:
                left.forks.append((fork, gradient, [nodes[index].variable for index in weights]))
        return list(found[: len(leaves)]), left

    @staticmethod
    def outward(left: Left) -> None:
        """W: add what is left to the weights. Each fork by itself: from one root on, another fork may be reached anew."""
        for fork, gradient, weights in left.forks:
            accumulate([fork], [gradient], weights)
        if left.roots:
            accumulate(left.roots, left.gradients)


def _whole(
    leaves: Sequence[torch.Tensor], roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    if roots:
        accumulate(roots, gradients)
    return [leaf.grad for leaf in leaves]


def _add(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Through the weights' own place in autograd, which runs the hooks that wait for a gradient to be added."""
    pairs = [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([weight for weight, _ in pairs], [gradient for _, gradient in pairs])


def _taken_out(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """What these nodes saved is in the list from now on, and in the graph no more: cleared, it is freed.

    A saved tensor that somebody else packed already stays where it is, and so does a weight, which lives anyway.
    """
    shelf: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        shelf.append(tensor)
        return len(shelf) - 1

    for node in nodes:
        for raw, plain in _saved_names(node):
            held: Any = getattr(node, raw)
            for saved in held if isinstance(held, tuple) else (held,):
                if _is_worth_freeing(saved.data) and saved.unpack_hook is None:
                    getattr(node, plain)  # raises when it was written in place meanwhile; unpacking would not notice
                    saved.register_hooks(pack, shelf.__getitem__)
    return shelf


def _is_worth_freeing(saved: Any) -> bool:
    return isinstance(saved, torch.Tensor) and saved.dim() > 0 and not isinstance(saved, torch.nn.Parameter)


_NAMES: dict[type, tuple[tuple[str, str], ...]] = {}


def _saved_names(node: Node) -> tuple[tuple[str, str], ...]:
    """The attributes of what a node saved, raw and unpacked."""
    kind = type(node)
    if kind not in _NAMES:
        _NAMES[kind] = tuple((name, unpacked_name(name)) for name in raw_saved_names(node))
    return _NAMES[kind]
