"""The check that a model computes every position of a sequence by itself, but for causal attention: then it can run on slices.

Linear, LayerNorm, Embedding, gelu, +      along features, or element by element: position by position
view, transpose, chunk                     if they keep positions apart and in their order
scaled_dot_product_attention               causal: reads the keys and values of earlier slices
arange(length), table[:, :length]          positions: those of the slice
mean(1), cumsum(1), Conv1d, BatchNorm      refused: they mix positions
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from pipecompile.errors import PlanError
from pipecompile.graph.batch_rows import ALONG, ELEMENT_LAYERS, MOVES, RESHAPES, dims_along, is_elementwise
from pipecompile.graph.causal_masks import constants_of, is_causal_mask
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.row_order import word_of
from pipecompile.graph.sequence_axes import Axis, SequenceAxes, UnclearAxisError
from pipecompile.graph.slice_layers import fault_on_slices
from pipecompile.torch_private import pytree
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["SequenceFlow"]

_FACTORIES = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
_SHAPED = (*RESHAPES, *_FACTORIES, "expand", "arange", "getitem")
"""Functions whose arguments say a length, and may differ between the two recordings."""

_ATTENTION = "scaled_dot_product_attention"
_CAUSAL = "F.scaled_dot_product_attention(query, key, value, is_causal=True)"


class SequenceFlow:
    """The calls of a graph whose result depends on where a slice begins.

    `attentions` are causal attentions, `positions` count from 0, and `tables` map a slice of a table with a row per position to the
    dimension of positions. `unclear` are constants, such as masks, that are not rows of positions. Construction raises PlanError for
    a call that mixes positions.
    """

    def __init__(
        self, part: TracedGraph, whole: TracedGraph, n_slices: int, length: int, subject: str = "the model"
    ) -> None:
        self.graph, self.whole, self.subject = part, whole, subject
        self.written = {key for one in part.graph.nodes if one.op == "get_attr" for key in facts(one).storages}
        self.attentions: list[fx.Node] = []
        self.positions: list[fx.Node] = []
        self.tables: dict[fx.Node, int] = {}
        self.unclear: set[fx.Node] = set()
        self.constants = constants_of(part)
        self._calls = [one for one in compute_nodes(part) if one.op == "call_module" or word_of(one) == "embedding"]
        self._check_calls()
        self.axes = SequenceAxes(part, whole, n_slices, length)
        for node in part.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._note_source(node)
        for node in compute_nodes(part):
            self._visit(node)
        self.check_layers()

    def check_layers(self) -> None:
        """Raise PlanError if a layer has hooks or settings by now with which it would do something else on slices."""
        for node in self._calls:
            layer = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
            if fault := fault_on_slices(node, layer):
                self._refuse(node, fault)

    def _check_calls(self) -> None:
        """Raise PlanError unless both recordings have the same calls."""
        pairs = list(zip(self.graph.graph.nodes, self.whole.graph.nodes, strict=False))
        differ = [part for part, whole in pairs if (part.op, part.name) != (whole.op, whole.name)]
        if differ or len(self.graph.graph.nodes) != len(self.whole.graph.nodes):
            raise PlanError(
                f"{self.subject} makes other calls for a shorter sequence, so it cannot run on slices",
                where=line_of(facts(differ[0]).source) if differ else "",
                why="slices are cut from a recording of the whole sequence",
                hint='schedule="1f1b"',
            )

    def _note_source(self, node: fx.Node) -> None:
        try:
            dims = self.axes.dims(node)
        except UnclearAxisError:
            dims = [None] if node.op == "get_attr" else self._refuse(node, "its size is not a multiple of a slice's")
        self.axes.axes[node] = [None if dim is None else Axis(dim) for dim in dims]

    def _visit(self, node: fx.Node) -> None:
        noted = facts(node)
        if noted.draws or noted.seeds:
            self._refuse(node, "it draws random numbers, which would be others for slices", "a dropout of 0")
        if hasattr(node.target, "place"):
            self._refuse(node, "it leaves a value on the model, once per slice")
        if noted.mutates & (self.written | noted.reads):
            self._refuse(node, "it writes into a parameter or buffer, once per slice")
        try:
            self._check_constants(node)
            self.axes.axes[node] = self._axes(node)
        except UnclearAxisError:
            if node not in self.constants:
                self._refuse(node, "it may mix positions of the sequence")
            self.unclear.add(node)

    def _check_constants(self, node: fx.Node) -> None:
        """Raise UnclearAxisError for a call of a constant without axis, which only the mask of an attention may be."""
        read = self.unclear.intersection(node.all_input_nodes)
        if read and (self.word(node) != _ATTENTION or read != {_options(node).get("attn_mask")}):
            raise UnclearAxisError

    def _refuse(self, node: fx.Node, why: str, hint: str = "") -> Any:
        raise PlanError(
            f"{self.subject} cannot run on slices of a sequence: {_title(node)}",
            where=line_of(facts(node).source) or node.name,
            why=why,
            hint=f"{hint}; or " * bool(hint) + 'schedule="1f1b"',
        )

    # -- rules ------------------------------------------------------------------------------------------------------

    def _axes(self, node: fx.Node) -> list[Axis | None]:
        """Return the axis of each leaf. Raise UnclearAxisError if positions may mix."""
        dims, sources = self.axes.dims(node), [s for s in node.all_input_nodes if self.axes.of(s) is not None]
        word = self.word(node)
        if word not in _SHAPED:
            self.check_numbers(node)
        if not sources or word in _FACTORIES:
            return self._axes_of_constant(node, word, dims)
        if node.op == "call_module":
            self._check_layer(node, self.graph.get_submodule(str(node.target)), sources)
        elif node.target is operator.getitem and not isinstance(value_of(node.args[0]), torch.Tensor):  # type: ignore[arg-type]
            return [Axis(dim, self._inner(sources)) if dim is not None else None for dim in dims]
        elif word in RESHAPES:
            return [self.axes.reshaped(sources[0], node)] if len(sources) == 1 else self._unclear()
        elif not self._keeps(word, node, sources):
            raise UnclearAxisError
        if None in dims:
            raise UnclearAxisError
        return [None if dim is None else Axis(dim, self._inner(sources)) for dim in dims]

    def check_numbers(self, node: fx.Node) -> None:
        """Raise UnclearAxisError if a call has other plain values for a shorter sequence, such as a divisor."""
        if _numbers(node) != _numbers(self.axes.twins[node]):
            raise UnclearAxisError

    @staticmethod
    def word(node: fx.Node) -> str:
        """Return the name of the function or method that a node calls, without the underscore of one that works in place."""
        word = word_of(node) if node.op != "call_module" else ""
        return str(node.args[1]) if word == "getattr" else word if word.endswith("__") else word.strip("_")

    @staticmethod
    def _unclear() -> Any:
        raise UnclearAxisError

    def _inner(self, sources: list[fx.Node]) -> int:
        inner = {axis.inner for source in sources if (axis := self.axes.of(source)) is not None}
        return inner.pop() if len(inner) == 1 else self._unclear()

    def _axes_of_constant(self, node: fx.Node, word: str, dims: list[int | None]) -> list[Axis | None]:
        """Return the axes of a value that no positions go into: positions themselves, rows of a table, or the same for all slices."""
        if all(dim is None for dim in dims):
            return list(dims)  # type: ignore[arg-type]
        (dim,) = dims
        assert dim is not None
        if word == "arange" and node.args in ((self.axes.length,), (0, self.axes.length)):
            self.positions.append(node)
        elif word == "getitem" and self._is_table(node, dim):
            self.tables[node] = dim
        elif word not in (*_FACTORIES, "expand"):
            raise UnclearAxisError
        return [Axis(dim)]

    def _is_table(self, node: fx.Node, dim: int) -> bool:
        """Return whether an index takes rows from the beginning along `dim`, and whole dimensions before."""
        index: tuple[Any, ...] = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if len(index) <= dim or not all(isinstance(one, slice) for one in index[: dim + 1]):
            return False
        *before, last = index[: dim + 1]
        is_first = _is_from_start(last) and last.stop == self.axes.length
        return is_first and all(one == slice(None) for one in (*before, *index[dim + 1 :]))

    def _check_layer(self, node: fx.Node, layer: nn.Module, sources: list[fx.Node]) -> None:
        axis, rank = self.axes.of(sources[0]), self.axes.rank(sources[0])
        assert axis is not None
        if isinstance(layer, ELEMENT_LAYERS):
            return
        n_features = 1 if type(layer) is nn.Linear else 0
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
            n_features = len(layer.normalized_shape)
        if not n_features or axis.dim >= rank - n_features:
            self._refuse(node, f"{type(layer).__name__} may mix positions of the sequence")

    def _keeps(self, word: str, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Return whether a function of values with positions keeps these apart."""
        first, axes = sources[0], [self.axes.of(source) for source in sources]
        axis = axes[0]
        assert axis is not None
        if word == _ATTENTION:
            return self._attends(node)
        if is_elementwise(word):
            return self._is_aligned(node, sources)
        if word in MOVES:
            return len(sources) == 1
        if word in ALONG:
            is_first = len(sources) == 1 and first is node.args[0]
            return is_first and axis.dim not in dims_along(word, node, self.axes.rank(first))
        if word in ("cat", "stack", "concat", "concatenate"):
            return self._joins(node, sources)
        if word == "getitem":
            return len(sources) == 1 and first is node.args[0] and self._takes_all(node, first, axis)
        return self._multiplies(word, node, first, axis) and len(sources) == 1

    def _is_aligned(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        (dim,), rank = self.axes.dims(node), self.axes.rank(node)
        axes = [(self.axes.of(source), self.axes.rank(source)) for source in sources]
        return dim is not None and all(axis is not None and axis.dim - size == dim - rank for axis, size in axes)

    def _takes_all(self, node: fx.Node, source: fx.Node, axis: Axis) -> bool:
        """Return whether x[index] takes all positions in their order."""
        index, dim = node.args[1], self.axes.dims(node)[0]
        items = [one for one in (index if isinstance(index, tuple) else (index,)) if one is not None]
        if dim is None or any(isinstance(one, fx.Node) for one in items):
            return False
        if Ellipsis in items:
            missing = self.axes.rank(source) - len(items) + 1
            place = items.index(Ellipsis)
            items[place : place + 1] = [slice(None)] * missing
        taken = items[axis.dim] if axis.dim < len(items) else slice(None)
        sizes = [self.axes.size(one, at) for one, at in ((source, axis.dim), (node, dim))]
        return isinstance(taken, slice) and _is_from_start(taken) and sizes[0] == sizes[1]

    def _joins(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Return whether values are concatenated or stacked along another dimension than that of positions."""
        parts = node.args[0] if node.args else node.kwargs.get("tensors")
        dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        places = {self.axes.of(source) for source in sources}
        is_all = isinstance(parts, (tuple, list)) and all(part in sources for part in parts)
        return is_all and len(places) == 1 and dim % self.axes.rank(node) != self.axes.dims(node)[0]

    def _multiplies(self, word: str, node: fx.Node, first: fx.Node, axis: Axis) -> bool:
        """Return whether a product has positions in the rows of its first factor, or in the columns of its second."""
        rank, place = self.axes.rank(first), node.args.index(first) if first in node.args else -1
        if word == "embedding":
            return place == 0
        if word in ("linear", "layer_norm", "rms_norm"):
            n_features = len(node.args[1]) if word.endswith("norm") and isinstance(node.args[1], (tuple, list)) else 1
            return place == 0 and axis.dim < rank - n_features
        if word in ("matmul", "mm", "bmm"):
            return rank > 1 and (axis.dim == rank - 2 if place == 0 else place == 1 and axis.dim == rank - 1)
        return (word == "addmm" and place == 1 and axis.dim == 0) or (word == "outer" and place == 0)

    def _attends(self, node: fx.Node) -> bool:
        """Return whether an attention is causal, with positions in the rows of queries, keys and values. Raise PlanError if it is
        not causal.
        """
        options = _options(node)
        mask = options.get("attn_mask")
        is_causal = mask is None and options.get("is_causal") is True
        if not is_causal and not (isinstance(mask, fx.Node) and is_causal_mask(self.whole, self.axes.twins[mask])):
            self._refuse(node, "attention reads later positions, or has a mask of its own", _CAUSAL)
        if options.get("dropout_p", 0.0) != 0.0:
            self._refuse(node, "its dropout would draw other numbers for slices", "dropout_p=0.0")
        inputs: list[Any] = [
            *node.args[:3],
            *(node.kwargs[name] for name in ("query", "key", "value") if name in node.kwargs),
        ]
        axes = [(self.axes.of(one), self.axes.rank(one)) for one in inputs]
        self.attentions.append(node)
        return len(node.args) >= 3 and all(axis == Axis(rank - 2) for axis, rank in axes)


def _is_from_start(index: slice) -> bool:
    """Return whether a slice of Python takes rows one by one from the first."""
    return index.start in (None, 0) and index.step in (None, 1)


def _options(node: fx.Node) -> dict[str, Any]:
    """Return the options of an attention by name."""
    return dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | dict(node.kwargs)


def _title(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else word_of(node) or node.name


def _numbers(node: fx.Node) -> list[Any]:
    """Return the plain values among the arguments of a call."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [str(leaf) for leaf in leaves if not isinstance(leaf, fx.Node)]
