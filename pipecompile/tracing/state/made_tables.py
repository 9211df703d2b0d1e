"""Tables that every run of a graph makes anew, and that a model keeps once they are made: where eager leaves them, and their nodes.

if self.cos is None or len(self.cos) < n:     missing while recorded: the graph computes `cos` in every run
    self.cos, self.n = make(n), n             MadeTable(place of `cos`, node of make(n)), MadeTable(place of `n`, 6)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.tracing.emit.value_nodes import PLAIN, ValueNodes
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.state.container_routes import ContainerRoute
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.leftover_state import StateChange

__all__ = ["MadeTable", "NodeName", "is_note", "made_tables"]


@dataclass(frozen=True, slots=True)
class NodeName:
    """Stands for a tensor: the name of the node that computes it."""

    name: str


@dataclass(frozen=True, slots=True)
class MadeTable:
    """A table, or a number or flag beside it, that a call puts at a `place` of the module at the path `owner`. Tensors in `value` are names
    of nodes. `name` is the path by which the user's code reaches the place, `source` the line that computes a table,
    `shapes` those of its tensors.
    """

    owner: str
    name: str
    source: str
    shapes: tuple[str, ...]
    place: EffectPlace
    value: Any


def is_note(change: StateChange, later: Sequence[StateChange]) -> bool:
    """Return whether a change is a flag or number that the second call leaves as it is, such as the length of a table."""
    return change.key is not None and not change.tensors and not any(map(change.is_at, later))


def made_tables(
    tables: Iterable[StateChange], notes: Sequence[StateChange], values: ValueNodes, model: nn.Module
) -> tuple[MadeTable, ...]:
    """Return the tables, and the notes of their modules, of the modules whose notes and tables are all plain."""
    made = [*tables]
    owners = {change.place.owner for change in made}
    changes = [*made, *(one for one in notes if one.place.owner in owners)]
    odd = {change.place.owner for change in changes if not _is_plain(change)}
    return tuple(_made_table(one, values, model) for one in changes if one.place.owner not in odd)


def _is_plain(change: StateChange) -> bool:
    """Return whether a change is made of tensors and values without parts, in containers without attributes."""
    leaves = pytree.tree_leaves([change.key, change.value])
    return all(isinstance(leaf, (torch.Tensor, torch.device, torch.dtype, *PLAIN)) for leaf in leaves)


def _made_table(change: StateChange, values: ValueNodes, model: nn.Module) -> MadeTable:
    owner = model.get_submodule(change.place.owner)
    route = ContainerRoute.to(change.place.container, owner, change.place.name)
    value = pytree.tree_map(
        lambda leaf: NodeName(values.node(leaf).name) if isinstance(leaf, torch.Tensor) else leaf, change.value
    )
    source = next((facts(values.node(one)).source for one in change.tensors), "")
    shapes = tuple(str(tuple(one.shape)) for one in change.tensors)
    return MadeTable(change.place.owner, change.name, source, shapes, EffectPlace(route, change.key), value)
