"""Advice on what to improve first: how much shorter the step would be if a stage, or the link between two devices, were faster.

    stage 2: 0.1 of its time less, and the step is 4.8% shorter         from a second simulation, not estimated
    link 0 -> 1: 0.1 of its time less, and the step is 0.9% shorter
    launching: 0.1 of its time less, and the step is 4.0% shorter       where one thread launches for all devices

Only a stage or link on the critical path can shorten the step, and by at most its time on that path. So few simulations suffice:
those of the places with the most time on the path. Where copies to several devices share an engine (`engines="device"`), a faster place
can change the order of copies, for better or worse: then all places are simulated.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass
from numbers import Real
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import Program, Schedule, place
from pipecompile.simulation.costs import CostOptions, Engines
from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.simulator import build_tasks, run_to_end
from pipecompile.simulation.task_graph import TaskGraph
from pipecompile.text.input_checks import whole
from pipecompile.text.shown_value import shown

__all__ = ["Advice", "advise"]

_MAX_SIMULATED = 12
"""Places that are simulated, those with the most seconds on the critical path first."""

HOST_PLACE = "host"

Place = int | tuple[int, int] | str
"""A stage, a pair of devices (source, target), or "host", which launches."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The effect of one improvement. `place` is a stage, a pair (source, target) of devices, or "host", whose launches take time.

    If `place` takes less time by the share `faster`, the step takes `saved` seconds less than `makespan` seconds. `critical` is
    the time of `place` on the critical path, in seconds.
    """

    place: Place
    faster: float
    saved: float
    critical: float
    makespan: float

    def __str__(self) -> str:
        if isinstance(self.place, int):
            text = f"stage {self.place}"
        else:
            text = "launching" if isinstance(self.place, str) else "link {} -> {}".format(*map(place, self.place))
        share, way = (
            abs(self.saved / self.makespan) if self.makespan else 0.0,
            "shorter" if self.saved >= 0 else "longer",
        )
        text = f"{text}: if it took {self.faster:.3g} of its time less, the step would be {share:.1%} {way}"
        hint = "; cuda_graphs=True, larger micro-batches or a process per device launch faster"
        return text + hint * (self.place == HOST_PLACE)


def advise(
    subject: Schedule | Program, *, faster: float = 0.1, most: int = 5, **costs: Unpack[CostOptions]
) -> tuple[Advice, ...]:
    """Return the stages and links, and the launching by the host, whose improvement shortens the step most, the best first; at most
    `most` stages and links.

    `faster` is the share of its time that an improved stage or link saves; `costs` are those of `simulate`. Raises the errors of
    `simulate`, and InputError if `faster` is not a share.
    """
    _check_share(faster)
    most = whole("most", most)
    tasks, checked = build_tasks(subject, **costs)
    times = run_to_end(subject, tasks, checked)
    seconds = _seconds_on_path(tasks, critical_path(tasks, times))
    advices: list[Advice] = []
    if tasks.issued:
        saved = times.makespan - walk(_scaled(tasks, HOST_PLACE, 1 - faster), checked.engines).makespan
        advices.append(Advice(HOST_PLACE, faster, saved, max(end for _, end in tasks.issued), times.makespan))
    if is_reordered := checked.engines is Engines.DEVICE:
        seconds.update(dict.fromkeys(_places(tasks), 0))
    for where, critical in seconds.most_common(None if is_reordered else _MAX_SIMULATED):
        if (
            not is_reordered
            and len(advices) >= most
            and faster * critical <= sorted(advice.saved for advice in advices)[-most]
        ):
            break
        saved = times.makespan - walk(_scaled(tasks, where, 1 - faster), checked.engines).makespan
        advices.append(Advice(where, faster, saved, critical, times.makespan))
    return tuple(sorted(advices, key=lambda advice: -advice.saved)[:most])


def _check_share(faster: float) -> None:
    """Raise InputError if `faster` is not a share of a time."""
    if not (isinstance(faster, Real) and 0 < faster <= 1):
        raise InputError(
            f"faster={shown(faster)} is not a share of a time",
            why="a share is above 0 and at most 1",
            hint="faster=0.1 for ten percent",
        )


def _places(tasks: TaskGraph) -> set[Place]:
    """Return the stages and links that take time."""
    stages: set[Place] = {
        a.stage for a, seconds in zip(tasks.actions, tasks.seconds, strict=True) if a is not None and seconds
    }
    return stages | {link for link, seconds in zip(tasks.links, tasks.delays, strict=True) if seconds}


def _seconds_on_path(tasks: TaskGraph, path: list[int]) -> Counter[Place]:
    """Return the seconds of the path per stage and link."""
    spent: Counter[Place] = Counter()
    for step in path:
        if step < 0:
            spent[tasks.links[~step]] += tasks.delays[~step]  # type: ignore[assignment]
        elif (action := tasks.actions[step]) is not None:
            spent[action.stage] += tasks.seconds[step]  # type: ignore[assignment]
    return spent


def _scaled(tasks: TaskGraph, place: Place, factor: float) -> TaskGraph:
    """Return the same tasks with the times of `place` multiplied by `factor`."""
    scaled = copy(tasks)
    if place == HOST_PLACE:
        scaled.issued = [(begin * factor, end * factor) for begin, end in tasks.issued]
        scaled.posted = {message: second * factor for message, second in tasks.posted.items()}
    elif isinstance(place, int):
        pairs = zip(tasks.seconds, tasks.actions, strict=True)
        scaled.seconds = [seconds * factor if a is not None and a.stage == place else seconds for seconds, a in pairs]
    else:
        pairs_of_devices = zip(tasks.delays, tasks.links, strict=True)
        scaled.delays = [seconds * factor if link == place else seconds for seconds, link in pairs_of_devices]
    return scaled
