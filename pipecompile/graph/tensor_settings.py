"""Calls that change a tensor itself and not its memory: hooks, gradients that it keeps, and whether it requires one.

    h.register_hook(hook)              a copy of h in another stage would give the hook a part of the gradient
    weight.requires_grad_(False)       all users of the weight, in all stages, see the change; `requires_grad_(True)` ends it

So the first stays with the call that makes h. What sets a flag of a parameter, and all users of the parameter, stay together: other
stages run at other times. Linear in the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import networkx as nx
from torch import fx

from pipecompile.tracing.node_facts import facts

__all__ = ["changed_tensors", "flagged_memory", "tie_flags"]

_ON_TENSOR = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})


def changed_tensors(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the memory of the tensors that calls change themselves, so that a copy cannot stand for one of them."""
    return {storage for node in nodes if _is_on_tensor(node) for storage in facts(node).mutates}


def _is_on_tensor(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target in _ON_TENSOR) or node.target is setattr


def _sets_flag(node: fx.Node) -> bool:
    """Return whether the call sets `requires_grad` of a tensor."""
    if node.target is setattr:
        return bool(node.args[1] == "requires_grad")
    return node.op == "call_method" and node.target == "requires_grad_"


def flagged_memory(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the memory of the parameters, buffers and constants whose `requires_grad` these nodes set."""
    found = [*nodes]
    held = {storage for node in found if node.op == "get_attr" for storage in facts(node).storages}
    return {storage for node in found if _sets_flag(node) for storage in _used(node) & held}


def tie_flags(graph: fx.GraphModule, nodes: Sequence[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie what sets `requires_grad` of a parameter to all users of the parameter."""
    for group in _users(graph.graph.nodes, nodes):
        setter = next(node for node in group if _sets_flag(node))
        place = f"{setter.name} ({facts(setter).source})" if facts(setter).source else setter.name
        nx.add_path(ties, [node.name for node in group], why=f"{place} sets requires_grad of a tensor that they use")


def _users(everything: Iterable[fx.Node], nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the users of each flagged memory."""
    flagged = flagged_memory(everything)
    groups: defaultdict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for storage in _used(node) & flagged:
            groups[storage].append(node)
    yield from groups.values()


def _used(node: fx.Node) -> frozenset[int]:
    """Return the memory that a call reads, or gives its users."""
    return frozenset().union(
        facts(node).reads, facts(node).storages, *(facts(one).storages for one in node.all_input_nodes)
    )
