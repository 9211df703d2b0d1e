"""Sizes that the data decide: symbols beside the batch size, each read from a tensor that has it.

boxes = roi_heads(...)               boxes: (s0, 4)
torch.zeros(len(boxes))       ──►    n = boxes.size(0);  zeros(n)       in the stage that reads the size
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from pipecompile.torch_private.symbols import ConstantSource, any_number_of_rows

__all__ = ["DataSizeCompared", "DataSizes", "refuse_comparisons"]


class DataSizeCompared(Exception):
    """Python, or a torch function, compared a size that the data decide."""


def refuse_comparisons(
    comparisons: Iterable[sympy.Basic], calls: Mapping[sympy.Symbol, int], *, in_torch: bool
) -> None:
    """Raise DataSizeCompared if these depend on sizes that the data decide; `calls` has the number of the call that returned each.

    Sizes of one call may be equal to each other, as the lengths of indices are, or to what a function of torch needs. Their call checks
    that in every run.
    """
    for comparison in comparisons:
        known = [calls[name] for name in comparison.free_symbols if name in calls]
        is_needed = isinstance(comparison, sympy.Eq) and len({*known}) == 1 and (in_torch or len(known) > 1)
        if known and not is_needed:
            raise DataSizeCompared


class DataSizes:
    """The sizes of one recording that the data decide.

    Comparisons are refused, or answered for the example: then they become conditions that opaque calls check in every run. `n_calls` counts
    the calls that return such sizes, and `calls` has the number of the call of each.
    """

    def __init__(self, env: ShapeEnv) -> None:
        self.env, self.n_calls = env, 0
        self.hints: dict[sympy.Symbol, int] = {}
        self.calls: dict[sympy.Symbol, int] = {}
        self._tensors: dict[sympy.Symbol, tuple[torch.Tensor, int]] = {}

    def new(self, example: int, alike: Sequence[sympy.Symbol] = ()) -> tuple[torch.SymInt, sympy.Symbol]:
        """Return a new size and its symbol. An `example` of 0 or 1 counts as 11 or more, so that nothing is broadcast.

        It counts as the sizes `alike`, which have the same example in the same call: `where` returns indices of one length.
        """
        unused = next(size for size in count(11) if size not in self.hints.values())
        hint = example if example > 1 else next((self.hints[name] for name in alike), unused)
        source = ConstantSource(f"rows_{len(self.hints)}")
        name = self.env.create_symbol(hint, source, DimDynamic.DYNAMIC, any_number_of_rows(), positive=None)
        self.hints[name], self.calls[name] = hint, self.n_calls
        size = self.env.create_symintnode(name, hint=hint)
        assert isinstance(size, torch.SymInt)
        return size, name

    def bind(self, tensor: torch.Tensor, sizes: Sequence[Any]) -> None:
        """Read the symbols among `sizes` from `tensor`, which has these sizes."""
        for dim, size in enumerate(sizes):
            if size in self.hints:
                self._tensors.setdefault(size, (tensor, dim))

    def symbols_in(self, expression: sympy.Basic) -> list[sympy.Symbol]:
        """Return the symbols of this kind in an expression."""
        return [name for name in self.hints if name in expression.free_symbols]

    def read(self, graph: fx.Graph, name: sympy.Symbol, node_of: Callable[[torch.Tensor], fx.Node]) -> fx.Node:
        """Return a new node that reads the size when the graph runs."""
        tensor, dim = self._tensors[name]
        return graph.call_method("size", (node_of(tensor), dim))

    def conditions(self, symbols: Iterable[sympy.Symbol], batch: sympy.Symbol) -> tuple[sympy.Basic, ...]:
        """Return what the recording assumed about the sizes `symbols` of one call.

        A size that was compared with a size of another call has to be as in the example.
        """
        names = set(symbols)
        conditions: dict[sympy.Basic, None] = {}
        concluded = [sympy.Eq(name, value) for name, value in self.env.replacements.items()]
        for condition in (*concluded, *(guard.expr for guard in self.env.guards)):
            involved = condition.free_symbols
            if involved <= names | {batch} and involved & names:
                conditions[condition] = None
            else:
                conditions.update({sympy.Eq(name, self.hints[name]): None for name in involved & names})
        return tuple(conditions)
