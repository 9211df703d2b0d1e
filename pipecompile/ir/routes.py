"""Routes of values between stages, and ties of parameters that several stages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["AUX", "HOST", "LOSS", "Route", "Sums", "TARGET", "Tie", "chain", "place", "stages_after", "union_routes"]

HOST = -1
"""The source of model inputs and the destination of model outputs, as an end of a route or a peer."""

Sums = Literal["eager", "device"]
"""Choice of the gradients of a value that a device adds up before it sends: those that eager autograd adds first, or all."""

TARGET, LOSS, AUX = "@target", "@loss", "@aux"
"""Names of the values that a training step adds to those of the model: target, loss and auxiliary output."""


@dataclass(frozen=True, slots=True)
class Route:
    """One value with its source and its consumers. It is sent directly from the source to each consumer's device, once.

    `source` is the producing stage, or HOST for an input of the model. `consumers` are stages in ascending order,
    followed by HOST if the value is an output. `nbytes` is the size in bytes for one micro-batch. If `gradient` holds,
    each consumer computes a gradient and sends it directly back to the source.

    `sums` are groups of consumers on one device, other than that of the source, in the order of their backwards. Each
    adds its gradient to that of the consumer before, and the last one alone sends: its gradient is that of the group.
    """

    value: str
    source: int
    consumers: tuple[int, ...]
    nbytes: float = 0.0
    gradient: bool = True
    sums: tuple[tuple[int, ...], ...] = ()

    @property
    def skips(self) -> tuple[int, ...]:
        """Return the consumers that the value reaches by skipping stages."""
        return () if self.source == HOST else tuple(c for c in self.consumers if c != HOST and c > self.source + 1)

    @property
    def senders(self) -> tuple[int, ...]:
        """Return the consumers that send a gradient to the source: all but those whose gradient another one adds to its own."""
        added = {stage for group in self.sums for stage in group[:-1]}
        return tuple(consumer for consumer in self.consumers if consumer not in added) if self.gradient else ()

    def added_by(self, stage: int) -> int | None:
        """Return the consumer whose gradient `stage` adds to its own, or None."""
        pairs = ((a, b) for group in self.sums for a, b in zip(group, group[1:], strict=False))
        return next((before for before, after in pairs if after == stage), None)

    def __str__(self) -> str:
        ends = "".join(f" {place(consumer)}" for consumer in self.consumers)
        sums = "".join(f" {'+'.join(map(str, group))}" for group in self.sums)
        gradient = ", gradient" * self.gradient + ", sums" * bool(sums) + sums
        return f"route {self.value}: {place(self.source)} ->{ends}, {_size(self.nbytes)} bytes{gradient}"


@dataclass(frozen=True, slots=True)
class Tie:
    """A group of parameters that several stages use.

    The parameters live on the device of the first stage, their home. Every other device that runs one of `stages` has a
    copy, which is refreshed before the step and whose gradient is added at the home after the step. `nbytes` is the
    size in bytes.
    """

    name: str
    stages: tuple[int, ...]
    nbytes: float = 0.0

    def devices(self, *placements: Sequence[int]) -> tuple[int, ...]:
        """Return the devices that hold the parameters, the home first, with the placements of all directions. A tie on one device has
        nothing to exchange.
        """
        return tuple(dict.fromkeys(placement[stage] for placement in placements for stage in self.stages))

    def __str__(self) -> str:
        stages = "".join(f" {stage}" for stage in self.stages)
        return f"tie {self.name}:{stages}, {_size(self.nbytes)} bytes"


def chain(n_stages: int) -> tuple[Route, ...]:
    """Return the routes of a plain pipeline: value v0 goes from stage 0 to stage 1, v1 from stage 1 to stage 2, and so
    on.
    """
    return tuple(Route(f"v{stage}", stage, (stage + 1,)) for stage in range(n_stages - 1))


def stages_after(n_stages: int, routes: Sequence[Route]) -> tuple[int, ...]:
    """Return, per stage, the number of stages on the longest path of values from the stage to the end; n_stages - 1 - s in a chain.

        0 ─► 1 ─► 4      3 2 1 ... two towers and a head: stages 0, 2 have 2 stages after, stages 1, 3 have 1, stage 4 has none
        2 ─► 3 ─┘

    Outputs go to the last stage, which computes the loss. Linear in the number of consumers.
    """
    consumers: list[set[int]] = [set() for _ in range(n_stages)]
    for route in routes:
        if route.source != HOST:
            consumers[route.source].update(n_stages - 1 if end == HOST else end for end in route.consumers)
    after = [0] * n_stages
    for stage in reversed(range(n_stages)):
        after[stage] = max((1 + after[end] for end in consumers[stage] if end > stage), default=0)
    return tuple(after)


def place(end: int | None) -> str:
    """Return the text of a route's end: the number of a stage or device, or "host"."""
    return "host" if end == HOST else str(end)


def _size(nbytes: float) -> float | int:
    return int(nbytes) if float(nbytes).is_integer() else nbytes


def union_routes(variants: Mapping[int, Sequence[Route]]) -> tuple[tuple[Route, ...], dict[int, dict[str, str]]]:
    """Return the routes that carry the values of all variants (recordings), and for each variant the names of its values in them.

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
