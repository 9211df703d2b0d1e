from __future__ import annotations

from pipecompile.ir import Action, Kind
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.task_graph import Anchor, TaskGraph


def test_an_empty_graph_has_no_devices_and_takes_no_time() -> None:
    tasks = TaskGraph()
    assert tasks.n_devices == 0
    assert walk(tasks).makespan == 0.0
    assert walk(tasks).is_complete


def test_lists_are_not_shared_between_graphs() -> None:
    first, second = TaskGraph(), TaskGraph()
    first.rows.append(range(1))
    first.actions.append(Action(0, Kind.FORWARD, 0))
    assert (first.n_devices, second.n_devices) == (1, 0)
    assert second.actions == []


def test_without_a_label_a_message_is_its_number() -> None:
    assert TaskGraph().label(3) == "3"


def test_anchors_index_the_four_lists_of_times() -> None:
    assert [anchor.name for anchor in sorted(Anchor)] == ["TASK_START", "TASK_END", "MESSAGE_START", "MESSAGE_END"]
