"""Verifier of routes: every value has one route, from an earlier stage (or the host) to later stages (or the host)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from numbers import Integral, Real

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import HOST, Route, chain
from pipecompile.text.input_checks import float_of
from pipecompile.text.shown_value import shown

__all__ = ["checked_routes", "is_name", "route_faults", "route_sequence"]

_NAME = re.compile(r"(?!@[0-9]+(?:\.[wr])?$)[^\s#'\[\]]+")


def checked_routes(routes: object, n_stages: int) -> tuple[Route, ...]:
    """Return the routes that a caller passes, or a chain for None. Raise InputError if they are no sequence, and VerifyError with
    all their faults.
    """
    sequence = route_sequence(routes, n_stages)
    if faults := route_faults(sequence, n_stages):
        raise VerifyError("the list of routes", faults)
    return sequence


def route_sequence(routes: object, n_stages: int) -> tuple[Route, ...]:
    """Return the routes that a caller passes, not checked, or a chain for None. Raise InputError if they are no sequence."""
    if routes is None:
        return chain(n_stages)
    try:
        return tuple(routes)  # type: ignore[arg-type]
    except TypeError:
        hint = "routes=None for a chain of stages"
        raise InputError(f"routes={shown(routes)} is not a sequence of routes", hint=hint) from None


def route_faults(routes: Sequence[Route], n_stages: int) -> list[str]:
    """Return all faults of `routes` between `n_stages` stages."""
    if strange := [f"{shown(route)} is not a Route" for route in routes if not isinstance(route, Route)]:
        return strange
    counts = Counter(route.value for route in routes)
    twice = [
        f"{count} routes are called {shown(name)}: a value has one route" for name, count in counts.items() if count > 1
    ]
    return [*twice, *(f"{_text(route)}: {fault}" for route in routes for fault in _faults(route, n_stages))]


def _text(route: Route) -> str:
    """Return the text of a route; its name alone if its numbers have more digits than Python writes."""
    try:
        return str(route)
    except (ValueError, OverflowError):
        return f"route {route.value}"


def is_name(text: str) -> bool:
    """Return whether a value or a tie may have this name: no spaces, none of # ' [ ], and not the name of a saved
    value.
    """
    return _NAME.fullmatch(text) is not None


def _faults(route: Route, n_stages: int) -> Iterator[str]:
    if not is_name(route.value):
        yield f"{shown(route.value)} is not a name: no spaces, no # ' [ ], and @0, @1 ... belong to the stages"
    if not (isinstance(route.nbytes, Real) and math.isfinite(float_of(route.nbytes)) and route.nbytes >= 0):
        yield "the size must be finite and not negative"
    ends = [route.source, *route.consumers]
    if strange := [end for end in ends if not isinstance(end, Integral)]:
        yield f"{shown(strange[0])} is not a stage"
        return
    if outside := [end for end in ends if end != HOST and not 0 <= end < n_stages]:
        yield f"there is no stage {shown(outside[0])}, stages are 0 to {n_stages - 1}"
    if not route.consumers:
        yield "the route has no consumer"
    keys = [n_stages if consumer == HOST else consumer for consumer in route.consumers]
    if keys != sorted(set(keys)):
        yield "consumers must be in ascending order, each once, the host last"
    yield from _sum_faults(route)
    if any(consumer != HOST and consumer <= route.source for consumer in route.consumers):
        yield f"the route goes back: every consumer must come after stage {shown(route.source)}"


def _sum_faults(route: Route) -> Iterator[str]:
    summed = [stage for group in route.sums for stage in group]
    if route.sums and (not route.gradient or route.source == HOST):
        yield "sums are of gradients that a stage sends to a stage"
    if strange := [stage for stage in summed if stage not in route.consumers or stage == HOST]:
        yield f"stage {shown(strange[0])} is in a sum, and no consumer"
    if len(set(summed)) < len(summed) or any(len(group) < 2 for group in route.sums):
        yield "a sum has at least two consumers, each in one sum"
