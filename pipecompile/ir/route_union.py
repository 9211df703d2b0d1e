"""Routes for micro-batches of several recordings: those of all recordings, each value under one name.

recording 1    h: 0 -> 1              k: 0 -> 1        recording 2    h: 0 -> 1 2
union          h: 0 -> 1 2            k: 0 -> 1        k is None in a micro-batch of recording 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipecompile.ir.routes import HOST, Route

__all__ = ["union_routes"]


def union_routes(variants: Mapping[int, Sequence[Route]]) -> tuple[tuple[Route, ...], dict[int, dict[str, str]]]:
    """Return the routes that carry the values of all variants, and for each variant the names of its values in them.

    A value that has another source in an earlier variant gets a name of its own. Linear in the number of routes.
    """
    merged: dict[str, Route] = {}
    names: dict[int, dict[str, str]] = {}
    for number, routes in variants.items():
        names[number] = {}
        for route in routes:
            value = route.value
            if value in merged and merged[value].source != route.source:
                value = f"{value}~{number}"
            names[number][route.value] = value
            merged[value] = _widened(merged[value], route) if value in merged else replace(route, value=value)
    return tuple(merged.values()), names


def _widened(route: Route, other: Route) -> Route:
    """Return a route to the consumers of both, the host last."""
    ends = sorted({*route.consumers, *other.consumers}, key=lambda end: (end == HOST, end))
    nbytes, gradient = max(route.nbytes, other.nbytes), route.gradient or other.gradient
    return replace(route, consumers=tuple(ends), nbytes=nbytes, gradient=gradient)
