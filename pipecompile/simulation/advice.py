"""What to improve first: by how much the step would shorten if a stage, or the way between two devices, were faster.

    stage 2: 0.1 of its time less, and the step is 4.8% shorter         measured by walking the program once more, not estimated
    link 0 -> 1: 0.1 of its time less, and the step is 0.9% shorter

Only what lies on the critical path can shorten it, and by no more than its own share of that, so few walks are needed: those
places are looked at that have the largest shares.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import Program, Schedule
from pipecompile.simulation.costs import CostOptions
from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.simulator import prepare, run_to_end
from pipecompile.simulation.task_graph import TaskGraph

__all__ = ["Advice", "advise"]

_LOOKED_AT = 12

Place = int | tuple[int, int]
"""A stage, or a pair of devices (source, target)."""


@dataclass(frozen=True, slots=True)
class Advice:
    """`place` is a stage, or a pair (source, target) of devices. With `faster` of its time taken off, the step takes `saved`
    less than `makespan`; `critical` is the part of the critical path that is spent there.
    """

    place: Place
    faster: float
    saved: float
    critical: float
    makespan: float

    def __str__(self) -> str:
        what = f"stage {self.place}" if isinstance(self.place, int) else "link {} -> {}".format(*self.place)
        return f"{what}: {self.faster:.3g} of its time less, and the step is {self.saved / self.makespan:.1%} shorter"


def advise(
    subject: Schedule | Program, *, faster: float = 0.1, most: int = 5, **costs: Unpack[CostOptions]
) -> tuple[Advice, ...]:
    """The stages and links whose improvement shortens the step most, `most` of them, the best first.

    `faster` is the share of its time that an improved place saves, `costs` are those of `simulate`. Raises as that does,
    and InputError when `faster` is no share.
    """
    if not 0 < faster <= 1:
        raise InputError(f"faster={faster!r} is no share of a time", hint="0.1 for ten percent")
    tasks, checked = prepare(subject, **costs)
    times = run_to_end(subject, tasks, checked)
    spent = _spent(tasks, critical_path(tasks, times))
    found: list[Advice] = []
    for place, critical in spent.most_common(_LOOKED_AT):
        if len(found) >= most and faster * critical <= sorted(advice.saved for advice in found)[-most]:
            break
        saved = times.makespan - walk(_scaled(tasks, place, 1 - faster), checked.engines).makespan
        found.append(Advice(place, faster, saved, critical, times.makespan))
    return tuple(sorted(found, key=lambda advice: -advice.saved)[:most])


def _spent(tasks: TaskGraph, path: list[int]) -> Counter[Place]:
    """Seconds of the path per stage and link."""
    spent: Counter[Place] = Counter()
    for step in path:
        if step < 0:
            spent[tasks.links[~step]] += tasks.delays[~step]  # type: ignore[assignment]
        elif (action := tasks.actions[step]) is not None:
            spent[action.stage] += tasks.seconds[step]  # type: ignore[assignment]
    return spent


def _scaled(tasks: TaskGraph, place: Place, factor: float) -> TaskGraph:
    """The same tasks with one place's times multiplied."""
    other = copy(tasks)
    if isinstance(place, int):
        pairs = zip(tasks.seconds, tasks.actions, strict=True)
        other.seconds = [seconds * factor if a is not None and a.stage == place else seconds for seconds, a in pairs]
    else:
        ways = zip(tasks.delays, tasks.links, strict=True)
        other.delays = [seconds * factor if way == place else seconds for seconds, way in ways]
    return other
