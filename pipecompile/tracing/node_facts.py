"""Facts that the recorder notes on each node of a traced graph, and the typed access to them.

    facts(node)                  the NodeFacts of a node; the defaults if nothing was noted
    note(node, module="head")    replace some of them
    value_of(node)               the fake tensor, structure or number that the node had while the model was recorded

A node keeps two entries in `node.meta`: torch.fx's own "val", and one NodeFacts. Copies of a node share the NodeFacts, which
are therefore immutable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import fx

from pipecompile.batching.containers import flatten_containers
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.recomputed_region import RecomputedRegion

__all__ = [
    "NodeFacts",
    "Role",
    "ambient_of",
    "facts",
    "has_facts",
    "has_regions",
    "leaves_of",
    "note",
    "set_facts",
    "value_of",
]

_FACTS = "pipecompile"
_NOTHING: frozenset[int] = frozenset()


class Role(Enum):
    """The part that a node plays in the graph.

    VALUE       a value or call of the model
    SIZE        a number computed from the batch size; it belongs to no stage, each stage computes the number again
    BATCH_SIZE  the SIZE node that reads the batch size from an input
    SWITCH      a call that turns grad mode or autocast on or off; it belongs to no stage, each stage gets its own switches
    """

    VALUE = "value"
    SIZE = "size"
    BATCH_SIZE = "batch_size"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of one node.

    module     dotted path of the innermost module whose forward made the call; "" for the root module
    source     line of the user's code, as "file:line in function"; "" for inputs, attributes and added nodes
    ambient    grad mode and autocast at the call; None for nodes that are not calls
    storages   keys of the memory that the value lives in; views of one tensor share a key
    mutates    keys of the memory that the call writes in place
    reads      keys of the memory of the parameters and buffers inside the called module
    draws      the call draws random numbers
    seeds      the call sets or gets the state of the random number generator
    region     the innermost call of `torch.utils.checkpoint` in which the call was made; None outside of all
    """

    module: str = ""
    source: str = ""
    ambient: Ambient | None = None
    storages: frozenset[int] = _NOTHING
    mutates: frozenset[int] = _NOTHING
    reads: frozenset[int] = _NOTHING
    draws: bool = False
    seeds: bool = False
    role: Role = Role.VALUE
    region: RecomputedRegion | None = None

    @property
    def is_size(self) -> bool:
        """Whether the node is a number computed from the batch size."""
        return self.role in (Role.SIZE, Role.BATCH_SIZE)


_DEFAULT = NodeFacts()


def facts(node: fx.Node) -> NodeFacts:
    """Return the facts of a node; the defaults for a node that the recorder did not make."""
    noted: NodeFacts = node.meta.get(_FACTS, _DEFAULT)
    return noted


def has_facts(node: fx.Node) -> bool:
    """Return whether facts and a value were noted on the node."""
    return _FACTS in node.meta and "val" in node.meta


def has_regions(nodes: Iterable[fx.Node]) -> bool:
    """Return whether the user's own `torch.utils.checkpoint` recomputes some of the nodes. Linear."""
    return any(facts(node).region is not None for node in nodes if node.op != "placeholder")


def set_facts(node: fx.Node, noted: NodeFacts, value: Any) -> None:
    """Note the facts and the value of a node."""
    node.meta["val"], node.meta[_FACTS] = value, noted


def note(node: fx.Node, **changes: Any) -> None:
    """Replace some facts of a node."""
    node.meta[_FACTS] = replace(facts(node), **changes)


def value_of(node: fx.Node) -> Any:
    """Return the value that the node had while recording; None for a node without one.

    The value is a fake tensor, a structure of fake tensors, a number (symbolic if it depends on the batch size) or a constant.
    """
    return node.meta.get("val")


def leaves_of(node: fx.Node) -> list[Any]:
    """Return the leaves of the value that the node had while recording, those in objects too."""
    return flatten_containers(value_of(node))[0]


def ambient_of(node: fx.Node) -> Ambient:
    """Return the modes in which a node was recorded."""
    ambient = facts(node).ambient
    assert ambient is not None, f"{node.name} was recorded without its modes"
    return ambient
