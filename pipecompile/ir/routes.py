"""What moves between stages: values along their routes, and tied parameters, which are refreshed and summed once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["AUX", "HOST", "LOSS", "TARGET", "Route", "Tie", "chain", "place"]

HOST = -1
"""The place where model inputs come from and outputs go to: a peer, and a route's end, like any other."""

TARGET, LOSS, AUX = "@target", "@loss", "@aux"
"""Names of the two values that a training step adds to those of the model."""


@dataclass(frozen=True, slots=True)
class Route:
    """One value and everybody who needs it: it goes from its source straight to each consumer's device, once.

    `source` is the producing stage, or HOST for an input of the model; `consumers` are stages in ascending order, with
    HOST at the end when the value is an output. `nbytes` is its size for one micro-batch. When `gradient` holds, each
    consumer computes a gradient that goes straight back.
    """

    value: str
    source: int
    consumers: tuple[int, ...]
    nbytes: float = 0.0
    gradient: bool = True

    @property
    def skips(self) -> tuple[int, ...]:
        """The consumers that the value reaches by passing over stages."""
        return () if self.source == HOST else tuple(c for c in self.consumers if c != HOST and c > self.source + 1)

    def __str__(self) -> str:
        ends = "".join(f" {place(consumer)}" for consumer in self.consumers)
        return f"route {self.value}: {place(self.source)} ->{ends}, {_size(self.nbytes)} bytes{', gradient' * self.gradient}"


@dataclass(frozen=True, slots=True)
class Tie:
    """A group of parameters that several stages use. It lives with the first of them, its home; every other device that
    runs one of `stages` has a copy, refreshed before the step, whose gradient is added at the home after it.
    """

    name: str
    stages: tuple[int, ...]
    nbytes: float = 0.0

    def devices(self, placement: Sequence[int]) -> tuple[int, ...]:
        """Those that hold it, the home first; one alone has nothing to exchange."""
        return tuple(dict.fromkeys(placement[stage] for stage in self.stages))

    def __str__(self) -> str:
        stages = "".join(f" {stage}" for stage in self.stages)
        return f"tie {self.name}:{stages}, {_size(self.nbytes)} bytes"


def chain(n_stages: int) -> tuple[Route, ...]:
    """The routes of a plain pipeline: every stage hands one value to the next; v0 goes from stage 0 to stage 1."""
    return tuple(Route(f"v{stage}", stage, (stage + 1,)) for stage in range(n_stages - 1))


def place(end: int | None) -> str:
    """How a route's end is written: a number, or the word for the host."""
    return "host" if end == HOST else str(end)


def _size(nbytes: float) -> float | int:
    return int(nbytes) if float(nbytes).is_integer() else nbytes
