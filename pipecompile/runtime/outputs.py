"""The structure of a model's output: how it is put together from the values of a micro-batch, or of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pipecompile.errors import InputError
from pipecompile.runtime.microbatch import gather

__all__ = ["Outputs", "own_loss"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the output: a named value of the graph, or something that is known without running.

    `unsized`: the data decide how large it is, so nobody knows how it comes together from micro-batches.
    """

    value: str | None
    batch_dim: int | None = None
    unsized: bool = False
    constant: Any = None
    expression: Any = None

    def known(self, size: int, symbol: Any) -> Any:
        """A constant, or a size for a batch of `size` samples."""
        return self.constant if self.expression is None else int(self.expression.subs({symbol: size}))


class Outputs:
    """The output of one traced graph."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.spec: pytree.TreeSpec = graph.meta["out_spec"]
        self.symbol = graph.meta["symbol"]
        node = graph.graph.output_node()
        arguments: Any = node.args[0]
        fixed: int | None = graph.meta["batch_size"]
        self.leaves = tuple(
            _leaf(arg, val, self.symbol, fixed) for arg, val in zip(arguments, node.meta["val"], strict=True)
        )
        self.names = tuple(dict.fromkeys(leaf.value for leaf in self.leaves if leaf.value is not None))
        self.example = pytree.tree_unflatten(node.meta["val"], self.spec)

    def assemble(self, value_of: Callable[[str], Any], size: int) -> Any:
        """The output of a batch of `size` samples whose values are given by name."""
        flat = [
            value_of(leaf.value) if leaf.value is not None else leaf.known(size, self.symbol) for leaf in self.leaves
        ]
        return pytree.tree_unflatten(flat, self.spec)

    def gathered(self, parts: Mapping[str, Sequence[Any]], sizes: Sequence[int]) -> dict[str, Any]:
        """The values of the whole mini-batch from those of its micro-batches."""
        self._check_sized(len(sizes))
        weights = [size / sum(sizes) for size in sizes]
        dims = {leaf.value: leaf.batch_dim for leaf in self.leaves}
        return {name: gather(parts[name], dims[name], weights) for name in self.names}

    def _check_sized(self, parts: int) -> None:
        unsized = [leaf.value for leaf in self.leaves if leaf.unsized]
        if parts > 1 and unsized:
            raise InputError(
                "an output's size depends on the data, so its micro-batches cannot be put together",
                where=", ".join(str(name) for name in unsized),
                hint="n_microbatches=1, or step, which needs the loss alone",
            )


def _leaf(argument: Any, value: Any, symbol: Any, fixed: int | None) -> Leaf:
    if isinstance(argument, fx.Node) and not argument.meta.get("scalar"):
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        batch_dim = _batch_dim(sizes, symbol, fixed)
        return Leaf(argument.name, batch_dim, batch_dim is None and any(isinstance(s, torch.SymInt) for s in sizes))
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return Leaf(None, expression=value.node.expr)
    return Leaf(None, constant=argument)


def _batch_dim(sizes: Sequence[Any], symbol: Any, fixed: int | None) -> int | None:
    """The first dimension whose size depends on the batch size, or is it, in a recording for one batch size alone."""
    for dim, size in enumerate(sizes):
        if isinstance(size, torch.SymInt):
            if symbol in size.node.expr.free_symbols:
                return dim
        elif fixed is not None and size == fixed:
            return dim
    return None


def own_loss(output: Any) -> Any:
    """The loss that a model computes itself: its output if that is a scalar, else `output.loss` or `output["loss"]`."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None
