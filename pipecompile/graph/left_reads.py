"""Ties of Python that reads what other Python of a forward leaves on an object: in two stages, it would find that of another micro-batch.

    scale = largest(x)     kept whole: sets self.scale       one stage      1F1 would set self.scale before 2F0 has read it
    out = self.gate(h)     kept whole: reads self.scale

Python runs in pieces kept whole and in hooks of layers. No edge of the graph leads from what sets an attribute to what reads it.
Hooks of a backward are no case: they find what the forward of their micro-batch has left (`runtime/cells/backward_reads.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

import networkx as nx
from torch import fx, nn

from pipecompile.torch_private.modules import children_of, forward_hooks_of
from pipecompile.tracing.loaded_names import left_names
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.opaque_module import OpaqueModule, runs_python
from pipecompile.tracing.reachable_code import plain_functions_in, reachable
from pipecompile.tracing.state.function_state import functions_near, places_near, roots_near

__all__ = ["tie_left_reads"]


def tie_left_reads(graph: fx.GraphModule, nodes: Sequence[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie each node whose Python reads an attribute to the nodes that set it. A node before another one may read what the forward of the
    micro-batch before has left.
    """
    called = {n: graph.get_submodule(str(n.target)) for n in nodes if n.op == "call_module"}
    uses = {node: use for node, module in called.items() if (use := _use_of(module)) is not None}
    effects = [(node, node.target.place) for node in nodes if hasattr(node.target, "place")]
    for reader, use in uses.items() if len(uses) + len(effects) > 1 else ():
        for node, place in effects:
            if place.key in use.read and id(place.container) in use.dicts:
                _tie(ties, node, reader, place.key)
        for writer, other in uses.items():
            names = use.read & other.bound if writer is not reader and use.module is not other.module else ()
            if name := next((name for name in sorted(names) if use.shares(other, name)), ""):
                _tie(ties, writer, reader, name)


def _tie(ties: nx.Graph[str], writer: fx.Node, reader: fx.Node, name: str) -> None:
    where = f" ({facts(reader).source})" if facts(reader).source else ""
    ties.add_edge(
        writer.name, reader.name, why=f"{reader.name}{where} reads {name!r}, which {writer.name} leaves on an object"
    )


@dataclass(eq=False)
class _PythonUse:
    """The Python that a call of a module runs. `near` returns the containers that it can reach."""

    module: nn.Module
    codes: tuple[CodeType, ...]
    near: Callable[[], list[Any]]
    owner: nn.Module | None = None

    @cached_property
    def read(self) -> frozenset[str]:
        return frozenset[str]().union(*(left_names(code)[0] for code in self.codes))

    @cached_property
    def bound(self) -> frozenset[str]:
        return frozenset[str]().union(*(left_names(code)[1] for code in self.codes))

    @cached_property
    def dicts(self) -> dict[int, dict[Any, Any]]:
        """The attributes of objects, and the dicts, by id."""
        return {id(one): one for one in self.near() if isinstance(one, dict)}

    def shares(self, writer: _PythonUse, name: str) -> bool:
        """Return whether both reach an object with this attribute, or one that the writer may give it: its own module."""
        common = self.dicts.keys() & writer.dicts.keys()
        own = None if writer.owner is None else id(vars(writer.owner))
        return own in common or any(name in self.dicts[key] for key in common)


def _use_of(called: nn.Module) -> _PythonUse | None:
    """Return the Python of the user that a call of this module runs; None if it runs none."""
    if not runs_python(called):
        return None
    if isinstance(called, OpaqueModule):
        owner = called.owner[0]
        codes = _codes_from(_begins(called), reachable(owner).functions, owner)
        return _PythonUse(called, codes, lambda: _containers(owner), owner)
    hooks = _hooks(called)
    functions = [one for hook in hooks for one in functions_near(hook)]
    return _PythonUse(called, _codes_from(hooks, functions), lambda: _containers(*hooks))


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for table in forward_hooks_of(module) for hook in table.values()]


def _containers(*holders: Any) -> list[Any]:
    return [place.container for holder in holders for place in places_near(holder, roots_near(holder))]


def _begins(called: OpaqueModule) -> list[Any]:
    """Return what the call of a piece runs first: a method, a block, a plain function; of a module the forwards and hooks inside."""
    owner, piece = called.owner[0], called.piece
    if piece.is_module:
        return [one for module in owner.modules() for one in (module.forward, *_hooks(module))]
    function = called.function or getattr(owner, piece.method)
    return [getattr(function, "function", function)]  # of a block


def _codes_from(
    begins: Sequence[Any], functions: Sequence[FunctionType], owner: nn.Module | None = None
) -> tuple[CodeType, ...]:
    """Return the codes of these functions, and of those that they name or close over, transitively; of a child of `owner` that they name,
    the codes of its functions.
    """
    by_name: dict[str, list[Any]] = {}
    for one in functions:
        by_name.setdefault(one.__name__, []).append(one)
    for name, child in children_of(owner).items() if owner is not None else ():
        by_name.setdefault(name, []).extend(one.forward for one in (child.modules() if child is not None else ()))
    found: dict[CodeType, None] = {}
    pending = list(begins)
    while pending:
        for function in plain_functions_in(pending.pop()):
            if function.__code__ not in found:
                found[function.__code__] = None
                pending += [one for name in function.__code__.co_names for one in by_name.get(name, ())]
    return tuple(found)
