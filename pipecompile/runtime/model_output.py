"""The structure of a model's output: how it is put together from the values of a micro-batch, or of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.batching.microbatches import MergeKind, MergeRule, gather
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Outputs", "own_loss"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the output: a named value of the graph, or something that is known without running."""

    value: str | None
    constant: Any = None
    expression: sympy.Basic | None = None
    kind: type = int

    def known(self, size: int, symbol: sympy.Symbol) -> Any:
        """A constant, or a number for a batch of `size` samples."""
        return self.constant if self.expression is None else self.kind(self.expression.subs({symbol: size}))


class Outputs:
    """The output of one traced graph. How its leaves are put together from several micro-batches is told when it is asked."""

    def __init__(self, graph: TracedGraph) -> None:
        self.spec: pytree.TreeSpec = graph.facts.out_spec
        self.symbol: sympy.Symbol = graph.facts.symbol
        node = graph.graph.output_node()
        arguments: Any = node.args[0]
        self.leaves = tuple(map(_leaf, arguments, value_of(node)))
        self.joins: tuple[MergeRule, ...] | None = None
        self.names = tuple(dict.fromkeys(leaf.value for leaf in self.leaves if leaf.value is not None))
        self.example = pytree.tree_unflatten(value_of(node), self.spec)

    def assemble(self, value_of: Callable[[str], Any], size: int) -> Any:
        """The output of a batch of `size` samples whose values are given by name."""
        flat = [
            value_of(leaf.value) if leaf.value is not None else leaf.known(size, self.symbol) for leaf in self.leaves
        ]
        return pytree.tree_unflatten(flat, self.spec)

    def whole(self, made: Mapping[str, Any], sizes: Sequence[int]) -> Any:
        """The output of the whole mini-batch from what `gathered` gives."""
        if not any(join.kind is MergeKind.LISTED for join in self.joins or ()):
            return self.assemble(made.__getitem__, sum(sizes))
        lists = [self.assemble(lambda name, m=m: made[name][m], size) for m, size in enumerate(sizes)]  # type: ignore[misc]
        return list(chain.from_iterable(lists))

    def join(self, joins: Sequence[MergeRule]) -> None:
        """From now on outputs are put together like this. Raises InputError when a leaf cannot be."""
        self.joins = tuple(joins)
        for index, (leaf, join) in enumerate(zip(self.leaves, joins, strict=True)):
            if join.kind is MergeKind.REFUSED:
                self.joins = None
                raise InputError(
                    f"the model's output cannot be put together from micro-batches: leaf {index}",
                    where=f"{leaf.value or leaf.constant!r}",
                    why=join.reason,
                    hint="n_microbatches=1, or a model that returns one row (or one number of rows) for each sample; step is not concerned",
                )

    def gathered(self, parts: Mapping[str, Sequence[Any]], sizes: Sequence[int]) -> dict[str, Any]:
        """The values of the whole mini-batch from those of its micro-batches."""
        return {name: gather(parts[name], self.join_of(name), sizes) for name in self.names}

    def join_of(self, name: str) -> MergeRule:
        """How a value is put together; of a single micro-batch nobody asked."""
        places = {leaf.value: place for place, leaf in enumerate(self.leaves)}
        return MergeRule(MergeKind.SAME) if self.joins is None else self.joins[places[name]]


def _leaf(argument: Any, value: Any) -> Leaf:
    if isinstance(argument, fx.Node) and argument.op == "get_attr":  # neither tensor nor number
        return Leaf(None, constant=value)
    if isinstance(argument, fx.Node) and not facts(argument).is_size:
        return Leaf(argument.name)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return Leaf(None, expression=sympy.sympify(value.node.expr), kind=value.node.pytype)
    return Leaf(None, constant=argument)


def own_loss(output: Any) -> Any:
    """The loss that a model computes itself: its output if that is a scalar, else `output.loss` or `output["loss"]`."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None
