"""Memory of every device over time, as a step function."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from pipecompile.simulation.task_graph import Anchor, Change, TaskGraph, Times

__all__ = ["Curve", "memory_curves"]

Curve = tuple[tuple[float, float], ...]
"""(time in seconds, bytes from that time on) at every change."""


def memory_curves(tasks: TaskGraph, times: Times) -> tuple[Curve, ...]:
    """Return the curve of each device. Changes at the same moment add up to one; a device that holds no bytes has an empty curve."""
    moments = {
        Anchor.TASK_START: times.start,
        Anchor.TASK_END: times.end,
        Anchor.MESSAGE_START: times.message_start,
        Anchor.MESSAGE_END: times.message_end,
    }
    base = tasks.constant or (0.0,) * tasks.n_devices
    return tuple(_curve(changes, moments, constant) for changes, constant in zip(tasks.changes, base, strict=True))


def _curve(changes: list[Change], moments: dict[Anchor, list[float]], base: float) -> Curve:
    timed = [
        (moments[when[0][0]][when[0][1]], size)
        if len(when) == 1
        else (max((moments[anchor][i] for anchor, i in when), default=0.0), size)
        for when, size in changes
    ]
    timed.sort(key=itemgetter(0))
    curve = [(0.0, base)] if base else []
    total = base
    for time, group in groupby(timed, key=itemgetter(0)):
        change = sum([size for _, size in group])
        if change:
            total += change
            if curve and curve[-1][0] == time:
                curve.pop()
            curve.append((time, total))
    return tuple(curve)
