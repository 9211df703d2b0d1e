from __future__ import annotations

from dataclasses import replace

from task_graphs import graph

from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.memory_curve import memory_curves
from pipecompile.simulation.task_graph import Anchor, Change

TASKS = graph([[2.0, 3.0]], [], [])


def curve(*changes: Change, constant: float = 0.0) -> list[tuple[float, float]]:
    tasks = replace(TASKS, changes=[list(changes)], constant=(constant,) if constant else ())
    return list(memory_curves(tasks, walk(tasks))[0])


def test_a_device_without_changes_has_an_empty_curve() -> None:
    assert curve() == []


def test_changes_apply_at_the_events_of_their_tasks() -> None:
    added, freed = (((Anchor.TASK_START, 0),), 10.0), (((Anchor.TASK_END, 1),), -10.0)
    assert curve(added, freed) == [(0.0, 10.0), (5.0, 0.0)]


def test_changes_at_the_same_moment_add_up_and_cancel() -> None:
    end, start = ((Anchor.TASK_END, 0),), ((Anchor.TASK_START, 1),)
    first = (((Anchor.TASK_START, 0),), 10.0)
    assert curve(first, (end, -10.0), (start, 10.0)) == [(0.0, 10.0)]
    assert curve(first, (end, -10.0), (start, 4.0)) == [(0.0, 10.0), (2.0, 4.0)]


def test_a_change_waits_for_the_latest_of_its_events() -> None:
    assert curve((((Anchor.TASK_END, 0), (Anchor.TASK_END, 1)), 3.0)) == [(5.0, 3.0)]
    assert curve(((), 3.0)) == [(0.0, 3.0)], "without an event it applies from the beginning"


def test_the_constant_is_below_all_changes() -> None:
    assert curve((((Anchor.TASK_END, 0),), 3.0), constant=100.0) == [(0.0, 100.0), (2.0, 103.0)]
    assert curve(((), 3.0), constant=100.0) == [(0.0, 103.0)]
