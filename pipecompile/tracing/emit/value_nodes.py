"""The map from live values to graph nodes while the model runs, and the conversion of call arguments to node arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import fx, nn

from pipecompile.batching.containers import ObjectShell, built, has_attributes, hides_tensors, object_shell, shell_of
from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.fx_graphs import root_of
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.torch_private.modules import buffers_of, parameters_of
from pipecompile.torch_private.storages import storage_key
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.call_description import HeldArgument, graph_path, is_code_text
from pipecompile.tracing.emit.call_objects import CallObjects, KnownObjects, remade
from pipecompile.tracing.emit.closures import ClosedOver, rebuilt, tensor_cells
from pipecompile.tracing.emit.written_back import is_written_back
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import Twins
from pipecompile.tracing.fakes.lifted_numbers import LiftedNumber, NotLiftedError
from pipecompile.tracing.node_facts import NodeFacts, facts, set_facts
from pipecompile.tracing.opaque.unread_parts import UnreadPart
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.user_source import caller

__all__ = ["CONSTANT", "PLAIN", "ValueNodes", "storages", "tensors_in"]

PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

CONSTANT = "_constant_"
"""Beginning of the names of attributes of a graph that the model does not have."""

_NOTHING: frozenset[int] = frozenset()
_FUNCTIONS = (FunctionType, MethodType, BuiltinMethodType, partial, HeldArgument)


def tensors_in(structure: object) -> list[torch.Tensor]:
    """Return all tensors of a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return keys of the memory of the tensors; views share a key. A key is valid while its tensor is alive."""
    return frozenset(storage_key(t) for t in tensors if t.layout is torch.strided)


_BASES: dict[type, Any] = {int: int.__int__, float: float.__float__, complex: complex, str: str.__str__}


def _plain(value: Any) -> Any:
    """Return a number or string of a derived class (an enum, a numpy scalar) as Python's own type, which fx can write."""
    for kind in (bool, int, float, complex, str):
        if isinstance(value, kind):
            return value if type(value) is kind else _BASES[kind](value)
    return value


def _is_written(value: Any) -> bool:
    """Return whether the code of a graph can contain this value."""
    return isinstance(value, PLAIN) and not (isinstance(value, str) and not is_code_text(value))


class ValueNodes:
    """Nodes of tensors by the tensors' ids. Each tensor is kept alive, so that no two tensors ever share an id.

    `region` is the user's call of `torch.utils.checkpoint` that is running, None outside of all: a fact of new nodes.
    """

    def __init__(self, graph: fx.Graph, symbol: BatchSymbol, twins: Twins, known: KnownObjects | None = None) -> None:
        self.graph, self.symbol, self.twins = graph, symbol, twins
        self.roots: dict[str, Any] = {}
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._owned: dict[int, tuple[str | None, torch.Tensor]] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._attributes: dict[int, fx.Node] = {}
        self._alive: list[Any] = []
        self.closed_over, self.call_objects = ClosedOver(), CallObjects(known)
        self._numbers: dict[int, Any] = {}
        self.region: RecomputedRegion | None = None

    def replace_by_fakes(self, model: nn.Module) -> None:
        """Replace all parameters and buffers by fake tensors. The caller restores the model."""
        self.call_objects.note_model(model)
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # its tensors are in C++ and cannot be replaced
                continue
            for table in (parameters_of(module), buffers_of(module)):
                for key, tensor in table.items():
                    if tensor is not None:
                        table[key] = twin = self.twins.of(tensor)
                        self._owned.setdefault(id(twin), (f"{path}.{key}".lstrip("."), tensor))
            self.buffers += [(module, key, twin) for key, twin in buffers_of(module).items() if twin is not None]

    @contextmanager
    def original_buffers(self) -> Iterator[None]:
        """Put the first fake buffers back into the model inside the block, but for those that are of another shape now, and let fake
        tensors stand for the model's attributes.

        A call such as `weight.float()` may return its own argument, which then stands for the result of the call.
        """
        now = [(module, key, buffers_of(module).get(key)) for module, key, _ in self.buffers]
        nodes, self._nodes = self._nodes, self._nodes | self._attributes
        try:
            for module, key, twin in self.buffers:
                if is_written_back(twin, buffers_of(module).get(key)):
                    buffers_of(module)[key] = twin
            yield
        finally:
            self._nodes = nodes
            for module, key, value in now:
                buffers_of(module)[key] = value

    def is_owned(self, twin: object) -> bool:
        """Return whether `twin` is the fake tensor of a parameter, a buffer or a constant."""
        return id(twin) in self._owned

    def is_fake_of(self, twin: object, tensor: object) -> bool:
        """Return whether `twin` is the fake tensor of this parameter, buffer or constant."""
        return id(twin) in self._owned and self._owned[id(twin)][1] is tensor

    def owned(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the name, the tensor and the fake tensor of each parameter and buffer of the model."""
        for name, tensor in [*self._owned.values()]:
            if name is not None:
                yield name, tensor, self.twins.of(tensor)

    def with_fakes(self, structure: Any) -> Any:
        """Return the structure with fake tensors in place of real ones, which are constants outside the model's tables."""
        if all(isinstance(tensor, FakeTensor) or self.has_node_for(tensor) for tensor in tensors_in(structure)):
            return structure
        return pytree.tree_map_only(torch.Tensor, self._fake_of, structure, is_leaf=has_attributes)

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or self.has_node_for(tensor):  # a DTensor is not a FakeTensor, but has one
            return tensor
        twin = self.twins.of(tensor)
        self._owned.setdefault(id(twin), (None, tensor))
        return twin

    def bind(self, value: torch.Tensor, node: fx.Node) -> None:
        """Let `node` stand for this tensor from now on."""
        self._nodes[id(value)] = node
        self._alive.append(value)

    def bind_result(self, result: Any, node: fx.Node) -> None:
        """Bind a call's result: the tensor itself, or every tensor inside it through `getitem` nodes."""
        if isinstance(result, torch.Tensor):
            self.bind(result, node)
        elif shell := shell_of(result):
            keys = len(shell.layout.keys)
            self._bind_items(zip(shell.layout.keys, shell.values[:keys], strict=True), node)
            self._bind_items(zip(shell.layout.own_attributes, shell.values[keys:], strict=True), node, getattr)
        elif isinstance(result, dict):
            self._bind_items(result.items(), node)
        elif isinstance(result, (tuple, list)):
            self._bind_items(enumerate(result), node)

    def _bind_items(self, items: Iterable[tuple[Any, Any]], node: fx.Node, take: Any = operator.getitem) -> None:
        for key, item in items:
            if tensors_in(item) or shell_of(item):
                child = self.graph.call_function(take, (node, key))
                noted = replace(
                    facts(node),
                    storages=storages(tensors_in(item)),
                    mutates=_NOTHING,
                    reads=_NOTHING,
                    draws=False,
                    seeds=False,
                )
                set_facts(child, noted, item)
                self.bind_result(item, child)

    def argument(self, value: Any) -> Any:
        """Return an argument of a call as an argument of a node."""
        if isinstance(value, torch.Tensor):
            return self.node(value)
        if isinstance(value, LiftedNumber):
            return value.graph_node(self.graph, self._numbers)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.symbol.argument(self.graph, value, self.node)
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            own = "__new__" in vars(type(value)) and type(value).__bases__ != (tuple,)  # as of PackedSequence
            return self._object(value, object_shell(value)) if own else type(value)(*map(self.argument, value))
        if isinstance(value, _FUNCTIONS):
            return self._function(value.value if isinstance(value, HeldArgument) else value)
        if shell := shell_of(value):
            return self._object(value, shell)
        if isinstance(value, (tuple, list)):
            return (tuple if isinstance(value, tuple) else list)(map(self.argument, value))
        if isinstance(value, dict):
            return self._dictionary(value)
        return _plain(value) if _is_written(value) else self._constant(value)

    def _dictionary(self, value: dict[Any, Any]) -> Any:
        """Return a dictionary, or if its keys cannot be written in code, a node that makes the dictionary when the graph runs."""
        if all(map(_is_written, value)):
            return {_plain(key): self.argument(item) for key, item in value.items()}
        node = self.graph.call_function(
            dict, ([(self.argument(key), self.argument(item)) for key, item in value.items()],)
        )
        set_facts(node, NodeFacts(source=caller(), ambient=Ambient.now(), region=self.region), value)
        return node

    def _object(self, value: Any, shell: ObjectShell) -> fx.Node:
        """Return a node that builds an object with tensors when the graph runs."""
        node = self.graph.call_function(built, (self._constant(shell.layout), [*map(self.argument, shell.values)]))
        set_facts(node, NodeFacts(source=caller(), ambient=Ambient.now(), region=self.region), value)
        return node

    def _function(self, function: Any) -> fx.Node:
        """Return a node that makes a function anew, with the tensors and objects of its call that it holds; else its constant."""
        value, target = function, cast(Any, remade)
        if (leaves := self.call_objects.leaves_around(function)) is not None:
            value, held = self.call_objects.note(function, leaves), self.argument(leaves)
            args: Any = (self._constant(self.call_objects), self._constant(value), held)
        elif contents := tensor_cells(function):
            self.closed_over.note(function, contents, caller())
            held, target = self.argument(list(contents.values())), rebuilt
            args = (self._constant(function), list(contents), held)
        else:
            return self._constant(function)
        node = self.graph.call_function(target, args)
        set_facts(node, NodeFacts(source=caller(), ambient=Ambient.now(), region=self.region), value)
        return node

    def result(self, value: Any) -> Any:
        """Return a leaf of the model's output as an argument of the output node. Raise TraceError."""
        if isinstance(value, LiftedNumber):
            raise NotLiftedError(value, "the model returns it")
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) or type(value) in PLAIN:
            return self.argument(value)
        if not hides_tensors(value):
            return self._constant(value)
        kind = type(value).__name__
        raise TraceError(f"cannot trace: the model returns a {kind}, which cannot be taken apart into tensors", code="PC105",
                         hint="return tuples, lists, dicts or objects with tensors among their attributes")  # fmt: skip

    def has_node_for(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has a node: a recorded call made the tensor, or the model owns it."""
        return id(tensor) in self._nodes or id(tensor) in self._owned

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """Return the node of a tensor: the call that made the tensor, or its attribute. Raise TraceError."""
        tensor = self._fake_of(tensor)
        if id(tensor) not in self._nodes:
            if id(tensor) not in self._owned:
                raise TraceError(code="PC107", where=caller())
            name, owned = self._owned[id(tensor)]
            self.bind(tensor, self._attribute(name, owned, tensor))
            self._attributes[id(tensor)] = self._nodes[id(tensor)]
        return self._nodes[id(tensor)]

    def _attribute(self, name: str | None, value: Any, seen: Any) -> fx.Node:
        target = graph_path(name) if name else f"{CONSTANT}{len(self.roots)}"
        self.roots[target] = value
        with self.graph.inserting_before(self._first()):
            node = self.graph.get_attr(target)
        set_facts(node, NodeFacts(module=(name or "").rpartition(".")[0], storages=storages(tensors_in(seen))), seen)
        return node

    def _constant(self, value: Any) -> fx.Node:
        if isinstance(value, UnreadPart):
            value.refuse()
        self._alive.append(value)
        if id(value) not in self._nodes:
            self._nodes[id(value)] = self._attribute(None, value, value)
        return self._nodes[id(value)]

    def _first(self) -> fx.Node:
        return next((n for n in self.graph.nodes if n.op != "placeholder"), root_of(self.graph))
