"""Sizes that the data decide: symbols beside the batch size, each read from the tensor that has it.

boxes = roi_heads(...)               boxes: (s0, 4)
torch.zeros(len(boxes))       ──►    n = boxes.size(0);  zeros(n)       in the stage that asks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from pipecompile.torch_private.symbols import ConstantSource

__all__ = ["DataSizes"]


class DataSizes:
    """The unknown sizes of one recording. Comparisons are answered for the example; what is concluded becomes a condition."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.hints: dict[sympy.Symbol, int] = {}
        self._measured: dict[sympy.Symbol, tuple[torch.Tensor, int]] = {}

    def new(self, example: int) -> tuple[torch.SymInt, sympy.Symbol]:
        """A size that is `example` in the example. None or one is recorded like many, so that nothing is broadcast."""
        hint = example if example > 1 else next(size for size in count(11) if size not in self.hints.values())
        name = self.env.create_symbol(hint, ConstantSource(f"rows_{len(self.hints)}"), DimDynamic.DYNAMIC, None)
        self.hints[name] = hint
        size = self.env.create_symintnode(name, hint=hint)
        assert isinstance(size, torch.SymInt)
        return size, name

    def bind(self, tensor: torch.Tensor, sizes: Sequence[Any]) -> None:
        """`tensor` has these sizes: here they can be read."""
        for dim, size in enumerate(sizes):
            if size in self.hints:
                self._measured.setdefault(size, (tensor, dim))

    def symbols_in(self, expression: sympy.Basic) -> list[sympy.Symbol]:
        """The unknown sizes that an expression is about."""
        return [name for name in self.hints if name in expression.free_symbols]

    def read(self, graph: fx.Graph, name: sympy.Symbol, node_of: Callable[[torch.Tensor], fx.Node]) -> fx.Node:
        """A node that reads the size when the graph runs."""
        tensor, dim = self._measured[name]
        return graph.call_method("size", (node_of(tensor), dim))

    def conditions(self, mine: Iterable[sympy.Symbol], batch: sympy.Symbol) -> tuple[sympy.Basic, ...]:
        """What the recording concluded about these sizes. One that was compared with another call's is held to the example."""
        names = set(mine)
        found: dict[sympy.Basic, None] = {}
        concluded = [sympy.Eq(name, value) for name, value in self.env.replacements.items()]
        for condition in (*concluded, *(guard.expr for guard in self.env.guards)):
            about = condition.free_symbols
            if about <= names | {batch} and about & names:
                found[condition] = None
            else:
                found.update({sympy.Eq(name, self.hints[name]): None for name in about & names})
        return tuple(found)
