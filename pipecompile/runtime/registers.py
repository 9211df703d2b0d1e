"""The state of one mini-batch on its way through a program. All else a runner holds is made once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Frame", "Spans"]

Spans = list[tuple[int, str, float, float]]
"""(device, action, start, end) of compute instructions as they ran, in seconds."""


@dataclass(slots=True)
class Frame:
    """Registers hold what instructions read and write, boxes what is between a SEND and its RECV.

    `arrivals` are what the host sends and `departures` what it gets back: per name, one entry per micro-batch;
    of a gradient one per stage that it comes from. `events` are those that were recorded, by launch.
    """

    registers: list[Any]
    boxes: list[Any]
    sizes: tuple[int, ...] = ()
    arrivals: dict[tuple[str, bool], Any] = field(default_factory=dict)
    departures: dict[tuple[str, bool], list[Any]] = field(default_factory=dict)
    spans: Spans = field(default_factory=list)
    events: dict[tuple[int, int], Any] = field(default_factory=dict)
