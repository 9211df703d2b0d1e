"""The way from a module to one of its containers: a loss or a hook may put another list or dict there between two micro-batches.

layer.seen.append(h)         recorded: extend(h), for the list that was there
loss: layer.seen = []        within a step; the next micro-batch appends to the new list
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["ContainerRoute"]

_KINDS = (dict, list, deque)


@dataclass(frozen=True, slots=True)
class ContainerRoute:
    """A container as it was recorded, and the names that lead to it from `start`; without names it is always this one."""

    recorded: Any
    start: Any = None
    names: tuple[str, ...] = ()

    @classmethod
    def to(cls, container: Any, module: nn.Module, name: str) -> ContainerRoute:
        """Return the route to a container in a module whose path inside the module is `name`."""
        route = cls(container, vars(module), tuple(name.split(".")) if name else ())
        return route if _followed(route.start, route.names) is container else cls(container)

    def find(self) -> Any:
        """Return the container that is there now; the recorded one if none of its kind is."""
        if not self.names:
            return self.recorded
        found = _followed(self.start, self.names)
        return found if type(found) is type(self.recorded) else self.recorded


def _followed(start: Any, names: tuple[str, ...]) -> Any:
    """Return what names lead to through attributes and keys; None if nothing is there."""
    here = start
    for name in names:
        here = here.get(name) if isinstance(here, dict) else None
        here = here if here is None or isinstance(here, _KINDS) else getattr(here, "__dict__", None)
    return here
