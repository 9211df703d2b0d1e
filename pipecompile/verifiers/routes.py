"""Verifier of routes: every value has one route, from an earlier stage (or the host) to later stages (or the host)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from pipecompile.ir import HOST, Route

__all__ = ["is_name", "route_faults"]

_NAME = re.compile(r"(?!@[0-9]+(?:\.[wr])?$)[^\s#'\[\]]+")


def route_faults(routes: Sequence[Route], n_stages: int) -> list[str]:
    """Return all faults of `routes` between `n_stages` stages."""
    counts = Counter(route.value for route in routes)
    twice = [
        f"{count} routes are called {name!r}: a value has one route" for name, count in counts.items() if count > 1
    ]
    return [*twice, *(f"{route}: {fault}" for route in routes for fault in _faults(route, n_stages))]


def is_name(text: str) -> bool:
    """Return whether a value or a tie may have this name: no spaces, none of # ' [ ], and not the name of a saved
    value.
    """
    return _NAME.fullmatch(text) is not None


def _faults(route: Route, n_stages: int) -> Iterator[str]:
    if not is_name(route.value):
        yield f"{route.value!r} is not a name: no spaces, no # ' [ ], and @0, @1 ... belong to the stages"
    if not (math.isfinite(route.nbytes) and route.nbytes >= 0):
        yield "the size must be finite and not negative"
    ends = [route.source, *route.consumers]
    if outside := [end for end in ends if end != HOST and not 0 <= end < n_stages]:
        yield f"there is no stage {outside[0]}, stages are 0 to {n_stages - 1}"
    if not route.consumers:
        yield "the route has no consumer"
    keys = [n_stages if consumer == HOST else consumer for consumer in route.consumers]
    if keys != sorted(set(keys)):
        yield "consumers must be in ascending order, each once, the host last"
    if any(consumer != HOST and consumer <= route.source for consumer in route.consumers):
        yield f"the route goes back: every consumer must come after stage {route.source}"
