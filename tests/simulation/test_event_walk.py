from __future__ import annotations

from task_graphs import graph

from pipecompile.simulation.costs import Engines
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.task_graph import NOTHING


def test_a_task_starts_when_the_one_before_has_ended_and_its_messages_have_arrived() -> None:
    """Device 0 runs tasks 0 and 1, device 1 task 2, which needs a message of task 0."""
    times = walk(graph([[2.0, 1.0], [5.0]], [(0, 2, 3.0)], [(0, 1)]))
    assert times.start == [0.0, 2.0, 5.0]
    assert times.end == [2.0, 3.0, 10.0]
    assert times.cause == [NOTHING, 0, ~0]
    assert (times.message_start, times.message_end, times.message_cause) == ([2.0], [5.0], [0])
    assert times.makespan == 10.0
    assert times.is_complete


def test_copies_of_one_link_queue_in_the_order_in_which_they_were_sent() -> None:
    times = walk(graph([[1.0, 1.0], [1.0, 1.0]], [(0, 2, 4.0), (1, 3, 4.0)], [(0, 1), (0, 1)]))
    assert times.message_start == [1.0, 5.0]
    assert times.message_cause == [0, ~0]
    assert times.order == [0, 1]


def test_copies_to_two_devices_overlap_unless_a_device_has_one_engine() -> None:
    tasks = graph([[1.0], [1.0], [1.0]], [(0, 1, 4.0), (0, 2, 4.0)], [(0, 1), (0, 2)])
    assert walk(tasks, Engines.PAIR).message_start == [1.0, 1.0]
    assert walk(tasks, Engines.DEVICE).message_start == [1.0, 5.0]


def test_a_message_of_no_time_occupies_no_engine() -> None:
    times = walk(graph([[1.0, 1.0], [1.0, 1.0]], [(0, 2, 4.0), (1, 3, 0.0)], [(0, 1), (0, 1)]))
    assert (times.message_start, times.message_end) == ([1.0, 2.0], [5.0, 2.0])


def test_messages_before_the_first_task_leave_at_zero() -> None:
    tasks = graph([[1.0], [1.0]], [], [(0, 1)])
    tasks.delays, tasks.first_sends[0], tasks.needs[1] = [3.0], (0,), (0,)
    times = walk(tasks)
    assert times.start == [0.0, 3.0]
    assert times.message_cause == [NOTHING]


def test_two_devices_that_wait_for_each_other_do_not_complete() -> None:
    """Tasks 0 and 2 need what tasks 3 and 1, later in the other row, send."""
    times = walk(graph([[1.0, 1.0], [1.0, 1.0]], [(1, 2, 1.0), (3, 0, 1.0)], [(0, 1), (1, 0)]))
    assert not times.is_complete


def test_a_last_message_can_end_after_the_last_task() -> None:
    tasks = graph([[1.0], []], [], [(0, 1)])
    tasks.delays, tasks.sends[0] = [9.0], (0,)
    assert walk(tasks).makespan == 10.0
