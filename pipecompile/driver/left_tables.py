"""Tables that a forward makes if they are missing, left on the model by the first run of a recording, as eager leaves them.

step(6)   no table there           the graph computes make(6) in each run; its first run leaves make(6) on the model
step(6)   the same table           the same recording serves: what it computes is what eager reads
step(4)   eager reads make(6)[:4]  guards see the table, and so does the recording for this signature
model.cos = None                   the state in which the first recording was made: it serves, and leaves its table again

A table that each other signature replaces (`if len(self.mask) != n`) says nothing to the next call: it is taken off the model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from pipecompile.torch_private import pytree
from pipecompile.torch_private.storages import memory_state
from pipecompile.tracing.fakes.batch_symbol import expression_of
from pipecompile.tracing.leaf_modules import has_own_python
from pipecompile.tracing.node_facts import ambient_of, facts, value_of
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.leftover_state import hooks_of
from pipecompile.tracing.state.made_tables import MadeTable, NodeName
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["LeftTables", "Spot", "replaced_spots", "spot_of"]

Spot = tuple[int, Any]
"""(id of a container, key)."""


class LeftTables:
    """The tables of one recording. Those that were left hold while neither they nor what they were computed from is written."""

    def __init__(self, graph: TracedGraph) -> None:
        self._graph = graph
        self._left: list[tuple[EffectPlace, Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._states: list[tuple[int, int]] = []
        self._tried: set[bool] = set()
        self._replaced: list[EffectPlace] | None = None

    @property
    def is_tried(self) -> bool:
        """Whether no table could be left in the present grad mode."""
        return torch.is_grad_enabled() in self._tried

    def leave(self, skipped: set[Spot]) -> bool:
        """Put the tables on the model, but for those at a `skipped` spot, and all beside them in a module that has numbers or flags too.
        Return whether there are any.
        """
        tables = [one for one in self._graph.facts.tables if self._beside(one).isdisjoint(skipped)]
        values = _NodeValues(self._graph)
        for owner in {one.owner: None for one in tables}:
            own = [one for one in tables if one.owner == owner]
            made = values.of_tables(own)
            for one, value in zip(own, made, strict=False):
                self._left.append((one.place, value, one.place.now()))
                one.place.put(value)
        self._tensors = [*_tensors([value for _, value, _ in self._left]), *values.sources]
        self._states = [*map(memory_state, self._tensors)]
        if not self._left:
            self.give_up()
        return bool(self._left)

    def of_batch(self, samples: int) -> list[MadeTable]:
        """Return the tables that are others for another number of samples, and do not begin with what they are for `samples`."""
        values, others = (_NodeValues(self._graph, number) for number in (samples, samples + 1))
        missing = [one for one in self._graph.facts.tables if one.shapes and spot_of(one.place) not in self.spots]
        with torch.no_grad():
            pairs = [(one, values.of_tables([one]), others.of_tables([one])) for one in missing]
        return [one for one, small, large in pairs if not _begins(large, small)]

    def give_up(self) -> None:
        """Let `is_tried` hold for the present grad mode."""
        self._tried.add(torch.is_grad_enabled())

    @property
    def spots(self) -> set[Spot]:
        """The spots of the tables that are left."""
        return {spot_of(place) for place, _, _ in self._left}

    @property
    def replaced(self) -> set[Spot]:
        """The spots at which a run of the recording replaces what is there."""
        if self._replaced is None:
            self._replaced = [place for _, place in _kept(self._graph)]
        return {*map(spot_of, self._replaced)}

    @property
    def own(self) -> set[Spot]:
        """The spots of all tables of the recording, left or not."""
        return {spot_of(one.place) for one in self._graph.facts.tables}

    @property
    def are_attributes(self) -> bool:
        """Whether a table is an attribute of a module, and no entry of a container; or whether there is no table."""
        return not self._left or any(not place.route.names for place, _, _ in self._left)

    def hold(self) -> bool:
        """Return whether the tables that were left are there, with the contents that a run of the recording computes."""
        if not self._left:
            return True
        is_there = all(_is_value(place.now(), value) for place, value, _ in self._left)
        return is_there and [*map(memory_state, self._tensors)] == self._states

    def forget(self) -> None:
        """Forget the tables that were left: the model has others, or none."""
        self._left, self._tensors, self._states = [], [], []

    def take_off(self, spots: set[Spot]) -> None:
        """Put back what was there before at these spots, and at those that go with them."""
        taken = {spot for one in self._graph.facts.tables if self._beside(one) & spots for spot in self._beside(one)}
        kept = [one for one in self._left if spot_of(one[0]) not in taken]
        if len(kept) < len(self._left):
            for place, _, before in self._left:
                if spot_of(place) in taken:
                    place.put(before)
            self.forget()

    def _beside(self, table: MadeTable) -> set[Spot]:
        """Return the spot of a table, and if its module has numbers or flags too, which may be of any table, all spots of that module."""
        own = [one for one in self._graph.facts.tables if one.owner == table.owner]
        return {spot_of(one.place) for one in own if one is table or not all(other.shapes for other in own)}


def spot_of(place: EffectPlace) -> Spot:
    """Return the spot of a place in the model as it is now."""
    return id(place.container), place.key


def replaced_spots(graph: TracedGraph, spots: set[Spot]) -> set[Spot]:
    """Return those of the spots at which a run of the graph puts tensors that are no larger than those that are there."""
    found = set()
    for node, place in _kept(graph):
        new = pytree.tree_map(lambda leaf: value_of(leaf) if isinstance(leaf, fx.Node) else leaf, node.args[0])
        if spot_of(place) in spots and 0 < _size(new) <= _size(place.now()):
            found.add(spot_of(place))
    return found


def _kept(graph: TracedGraph) -> Iterator[tuple[fx.Node, EffectPlace]]:
    """Yield the nodes that replace what is at a place."""
    for node in graph.graph.nodes:
        place = getattr(node.target, "place", None)
        if isinstance(place, EffectPlace) and node.target.__name__ == "keep":
            yield node, place


def _size(value: Any) -> int:
    return sum(int(one.numel()) for one in _tensors(value))


def _is_value(now: Any, value: Any) -> bool:
    """Return whether a value is the one that was left, or a plain one equal to it."""
    return now is value or (not isinstance(value, torch.Tensor) and type(now) is type(value) and _is_equal(now, value))


def _is_equal(now: Any, value: Any) -> bool:
    leaves, others = pytree.tree_leaves(now), pytree.tree_leaves(value)
    pairs = zip(leaves, others, strict=False)
    return len(leaves) == len(others) and all(
        one is other or (not isinstance(other, torch.Tensor) and one == other) for one, other in pairs
    )


def _begins(large: Any, small: Any) -> bool:
    """Return whether the tensors of a value begin with those of another one, in each dimension."""
    pairs = zip(*(_tensors(one) for one in (large, small)), strict=False)
    return all(_has_corner(one, other) for one, other in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _has_corner(large: torch.Tensor, small: torch.Tensor) -> bool:
    corner = large[tuple(map(slice, small.shape))]
    return corner.shape == small.shape and (small.is_meta or torch.equal(corner, small))


class _UncomputableError(Exception):
    """A node is not to be computed beside a run."""


class _NodeValues:
    """The values of nodes that are computed from constants alone, and if `samples` is given, for this size of the batch. `sources` are the
    tensors that they read.
    """

    def __init__(self, graph: TracedGraph, samples: int | None = None) -> None:
        self._graph, self._samples, self.sources = graph, samples, list[torch.Tensor]()
        self._nodes = {node.name: node for node in graph.graph.nodes}
        self._values: dict[fx.Node, Any] = {}

    def of_tables(self, tables: Sequence[MadeTable]) -> list[Any]:
        """Return the values of the tables of one module; none if one of them cannot be computed, or would hold a graph of autograd."""
        grad = torch.is_grad_enabled()
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                made = [pytree.tree_map(self._filled, one.value) for one in tables]
        except Exception:
            return []
        return [] if any(map(_requires_grad, pytree.tree_leaves(made))) else made

    def _filled(self, leaf: Any) -> Any:
        if not isinstance(leaf, NodeName):
            return leaf
        if leaf.name not in self._nodes:
            raise _UncomputableError
        return self._of(self._nodes[leaf.name])

    def _of(self, node: fx.Node) -> Any:
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        if facts(node).is_size:
            return self._number(node)
        if node.op == "get_attr":
            return self._source(node)
        layer = self._graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if layer is not None and (has_own_python(layer) or any(map(hooks_of, layer.modules()))):
            raise _UncomputableError  # the user's code would run once more
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._of)
        with ExitStack() as stack:
            self._enter_modes(node, stack)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            self.sources += layer.parameters() if layer is not None else ()
            return (node.target if layer is None else layer)(*args, **kwargs)  # type: ignore[operator]

    def _enter_modes(self, node: fx.Node, stack: ExitStack) -> None:
        """Enter the grad mode and autocast of a node, where they are not those outside."""
        mode, outside = ambient_of(node), self._graph.facts.outside
        if mode.kernels_beside(outside):
            raise _UncomputableError
        if mode.grad != outside.grad:
            stack.enter_context(torch.set_grad_enabled(mode.grad))
        for kind, dtype, _ in mode.autocast if mode.autocast != outside.autocast else ():
            wanted = getattr(torch, dtype) if dtype else None
            stack.enter_context(torch.autocast(kind, dtype=wanted, enabled=wanted is not None))

    def _source(self, node: fx.Node) -> Any:
        value: Any = self._graph
        for name in str(node.target).split("."):
            value = getattr(value, name)
        self.sources += [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
        return value

    def _number(self, node: fx.Node) -> int:
        """Return a size. Raise _UncomputableError if it depends on a batch size that is not given."""
        size = expression_of(value_of(node))
        if not size.is_number and self._samples is not None:
            size = size.subs(self._graph.facts.symbol, self._samples)
        if not size.is_number:
            raise _UncomputableError
        return int(size)


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
