"""The batch size as a symbol: how it is made, the guards on it, and the graph nodes that compute sizes from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from pipecompile.batching.batch_dims import Dims
from pipecompile.torch_private.symbols import ConstantSource, PythonReferenceAnalysis, own_caches, sympy_interp
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.fakes.data_sizes import DataSizes, refuse_comparisons
from pipecompile.tracing.fakes.shared_results import SharedResults
from pipecompile.tracing.node_facts import NodeFacts, Role, has_facts, set_facts
from pipecompile.tracing.user_source import caller

__all__ = ["BatchSymbol", "Guard", "batch_dims_of", "expression_of", "is_same_size"]


class Guard:
    """A condition on the batch size under which the recorded graph is right, because the model branched on it.

    `place` is the user's line with the branch, as "file:line in function".
    """

    def __init__(self, symbol: sympy.Symbol, condition: sympy.Basic, place: str = "") -> None:
        self.symbol, self.condition, self.place = symbol, condition, place
        self._known: dict[int, bool] = {}

    def holds(self, size: int) -> bool:
        """Return whether the graph is right for a batch of `size` samples."""
        if size not in self._known:
            self._known[size] = bool(self.condition.subs({self.symbol: size}))
        return self._known[size]

    def __str__(self) -> str:
        return str(self.condition).replace(str(self.symbol), "batch_size")


_FUNCTIONS = {"maximum": max, "minimum": min, "sqrt": math.sqrt, "exp": math.exp, "log": math.log, "log2": math.log2,
              "sin": math.sin, "cos": math.cos, "tan": math.tan, "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh,
              "asin": math.asin, "acos": math.acos, "atan": math.atan}  # fmt: skip


class _Arithmetic(PythonReferenceAnalysis):
    """Python's operators on fx proxies, with those that torch's analysis lacks and those that a proxy does not support."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(a: Any, _dtype: Any) -> Any:
        return _recorded_call(math.floor, a)

    @staticmethod
    def ceil_to_int(a: Any, _dtype: Any) -> Any:
        return _recorded_call(math.ceil, a)

    @staticmethod
    def round_to_int(a: Any, _dtype: Any) -> Any:
        return _recorded_call(round, a)

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return _recorded_call(round, a, b)

    @staticmethod
    def trunc_to_int(a: Any, _dtype: Any) -> Any:
        return _recorded_call(int, a)

    @staticmethod
    def to_dtype(a: Any, dtype: torch.dtype) -> Any:
        return _recorded_call(float if dtype.is_floating_point else int, a)


def _recorded_call(function: Any, *args: Any) -> Any:
    """Record a call as a node if an argument is a proxy, else compute it."""
    proxy = next((arg for arg in args if isinstance(arg, fx.Proxy)), None)
    return function(*args) if proxy is None else proxy.tracer.create_proxy("call_function", function, args, {})


for _name, _function in _FUNCTIONS.items():
    setattr(_Arithmetic, _name, staticmethod(partial(_recorded_call, _function)))


class _BatchShapeEnv(ShapeEnv):
    """A ShapeEnv that notes the user's line of each guard in `places`.

    While `is_lenient`, comparisons of sizes are answered for the example without a guard. Only an equality that fixes the
    batch size makes a guard even then: shapes would otherwise be right for the example alone. While it `refuses_data_sizes`,
    comparisons of sizes that the data decide raise DataSizeCompared.
    """

    is_lenient = refuses_data_sizes = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        own_caches(self)
        self.places: list[str] = []
        # numbers alone: a tensor here would never be freed, since the collector does not see that its sizes refer to this
        self.calls_of_sizes: dict[sympy.Symbol, int] = {}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        known = len(self.guards)
        value = self._evaluated(orig_expr, *args, **kwargs)
        if self.refuses_data_sizes:
            new = (guard.expr for guard in self.guards[known:])
            refuse_comparisons(new, self.calls_of_sizes, in_torch=self.is_lenient)
        if len(self.guards) > len(self.places):
            self.places += [caller()] * (len(self.guards) - len(self.places))
        return value

    def _evaluated(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_lenient:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        with self.suppress_guards():
            value = super().evaluate_expr(orig_expr, *args, **kwargs)
        if isinstance(orig_expr, sympy.logic.boolalg.Boolean) and (type(orig_expr), value) not in _EQUAL:
            return value
        return super().evaluate_expr(orig_expr, *args, **kwargs)


_EQUAL = ((sympy.Eq, sympy.true), (sympy.Ne, sympy.false))
"""Comparison and answer that fix a size."""


def _data_size_facts() -> NodeFacts:
    """Return the facts of a node that reads or computes a size that the data decide."""
    return NodeFacts(source=caller(), ambient=Ambient.now())


class BatchSymbol:
    """The symbol of the batch dimension of all inputs, and the graph nodes that compute sizes from it.

    `size` is the batch size in samples with which the recording computes: a SymInt, or with `fixed` a number. `root` is the
    node that reads the batch size; None if no input has a batch dimension.
    """

    def __init__(self, size: int, *, fixed: bool = False) -> None:
        self.env = _BatchShapeEnv(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            duck_shape=False,
            should_record_events=False,
            specialize_zero_one=False,
        )
        self.symbol = self.env.create_symbol(size, ConstantSource("batch"), DimDynamic.DYNAMIC, None)
        self.env.fake_tensor_cache = SharedResults(self.env, self.symbol, size)
        self.size: Any = size if fixed else self.env.create_symintnode(self.symbol, hint=size)
        self._nodes: dict[sympy.Basic, fx.Node] = {}
        self.root: fx.Node | None = None

    @cached_property
    def data_sizes(self) -> DataSizes:
        """The sizes that the data decide; few models have any."""
        sizes = DataSizes(self.env)
        self.env.calls_of_sizes = sizes.calls
        return sizes

    @property
    def fixed(self) -> int | None:
        """The only batch size in samples for which the recording is right; None if it is right for several."""
        number = self.size if isinstance(self.size, int) else self.env.replacements.get(self.symbol)
        return int(number) if number is not None and sympy.sympify(number).is_number else None

    def open(self, graph: fx.Graph, placeholders: Sequence[fx.Node], dims: Dims) -> None:
        """Make the node that reads the batch size from the first input with a batch dimension."""
        batched = [(node, dim) for node, dim in zip(placeholders, dims, strict=True) if isinstance(dim, int)]
        if batched and isinstance(self.size, torch.SymInt):
            self.root = graph.call_method("size", batched[0])
            set_facts(self.root, NodeFacts(role=Role.BATCH_SIZE), self.size)

    def argument(
        self,
        graph: fx.Graph,
        value: torch.SymInt | torch.SymFloat | torch.SymBool,
        node_of: Callable[[torch.Tensor], fx.Node],
    ) -> Any:
        """Return a symbolic number as an argument of a node: a constant if it is one, else the node that computes it.

        A size that the data decide is computed anew for every argument, in the stage of its node, from the tensor that has
        the size; `node_of` returns the node of a tensor.
        """
        expression = sympy.sympify(value.node.expr)
        if expression.is_number or expression in (sympy.true, sympy.false):
            return value.node.pytype(expression)
        if names := self.data_sizes.symbols_in(expression):
            before = len(graph.nodes)
            read = {name: self.data_sizes.read(graph, name, node_of) for name in names}
            return self._compute(graph, expression, value, read, before, _data_size_facts())
        if expression not in self._nodes:
            before = len(graph.nodes)
            self._nodes[expression] = self._compute(graph, expression, value, {}, before, NodeFacts(role=Role.SIZE))
        return self._nodes[expression]

    def _compute(
        self, graph: fx.Graph, expression: sympy.Basic, value: Any, read: Any, before: int, noted: NodeFacts
    ) -> fx.Node:
        """Return the node of an expression. `read` has nodes by symbol; nodes beyond the first `before` get `noted` as facts."""
        nodes = read if self.root is None else {self.symbol: self.root, **read}
        assert expression.free_symbols <= nodes.keys(), "a size depends on a batch that no input has"
        tracer = fx.proxy.GraphAppendingTracer(graph)
        proxies = {name: fx.Proxy(node, tracer) for name, node in nodes.items()}
        node: fx.Node = sympy_interp(_Arithmetic, proxies, expression).node
        for new in list(graph.nodes)[before:]:
            if not has_facts(new):
                set_facts(new, noted, None)
        node.meta["val"] = value
        return node

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Make no guards of comparisons inside the block, except of those that fix the batch size.

        Torch itself compares sizes inside a recorded call, to choose a convolution for instance. It will compare again when
        the graph runs, so the recording does not depend on the answer.
        """
        self.env.is_lenient = True
        try:
            yield
        finally:
            self.env.is_lenient = False

    def guards(self) -> tuple[Guard, ...]:
        """Return the conditions on the batch size under which the model's own branches go the same way."""
        places = [*self.env.places, *[""] * len(self.env.guards)]
        guards = [
            Guard(self.symbol, guard.expr, place)
            for guard, place in zip(self.env.guards, places, strict=False)
            if guard.expr.free_symbols == {self.symbol}
        ]
        if self.fixed is not None:
            guards.append(Guard(self.symbol, sympy.Eq(self.symbol, self.fixed)))
        return tuple({str(guard): guard for guard in reversed(guards)}.values())[::-1]


def batch_dims_of(value: torch.Tensor, symbol: sympy.Symbol) -> list[tuple[int, sympy.Basic]]:
    """Return (dimension, size) for each dimension whose size depends on the batch size."""
    found = enumerate(map(expression_of, value.shape))
    return [(dim, size) for dim, size in found if symbol in size.free_symbols]


def expression_of(size: Any) -> sympy.Basic:
    """Return a size as an expression of the batch symbol."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def is_same_size(one: Any, other: Any) -> bool:
    """Return whether two sizes are the same at every batch size, without a condition on the batch size."""
    sizes = (size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size for size in (one, other))
    return bool(sympy.expand(next(sizes) - next(sizes)) == 0)
