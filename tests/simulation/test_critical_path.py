from __future__ import annotations

from task_graphs import graph

from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.task_graph import TaskGraph


def path(tasks: TaskGraph) -> list[int]:
    return critical_path(tasks, walk(tasks))


def test_the_path_goes_through_the_message_that_the_last_task_waits_for() -> None:
    """Task 1, of 1 second, is not on it: the message of 3 seconds beside it takes longer."""
    assert path(graph([[2.0, 1.0], [5.0]], [(0, 2, 3.0)], [(0, 1)])) == [0, ~0, 2]


def test_the_path_goes_along_the_row_where_messages_arrive_early() -> None:
    assert path(graph([[2.0], [4.0, 1.0]], [(0, 2, 1.0)], [(0, 1)])) == [1, 2]


def test_a_copy_that_queues_waits_for_the_copy_before() -> None:
    assert path(graph([[1.0, 1.0], [1.0, 1.0]], [(0, 2, 4.0), (1, 3, 4.0)], [(0, 1), (0, 1)])) == [0, ~0, ~1, 3]


def test_what_takes_no_time_is_left_out() -> None:
    assert path(graph([[2.0, 0.0], [5.0]], [(1, 2, 0.0)], [(0, 1)])) == [0, 2]
    assert path(TaskGraph()) == []


def test_the_path_may_end_with_a_message() -> None:
    tasks = graph([[1.0], []], [], [(0, 1)])
    tasks.delays, tasks.sends[0] = [9.0], (0,)
    assert path(tasks) == [0, ~0]
