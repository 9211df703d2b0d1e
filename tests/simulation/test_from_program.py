from __future__ import annotations

from pipecompile.ir import HOST, Route, Schedule, Tie
from pipecompile.passes import lower
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.from_program import tasks_and_messages, tasks_of_program
from pipecompile.simulation.task_graph import Anchor, TaskGraph

ROUTES = (
    Route("x", HOST, (0,), 5.0, gradient=False),
    Route("v0", 0, (1,), 10.0),
    Route("y", 1, (HOST,), gradient=False),
)
SCHEDULE = Schedule.from_csv("0F0,0B0\n1F0,1B0\n")


def tasks() -> tuple[TaskGraph, list[str]]:
    program = lower(SCHEDULE, ROUTES)
    graph, messages = tasks_and_messages(program, make_costs(2, 2, ROUTES, transfer=2.0, saved_bytes=[100.0, 200.0]))
    return graph, [f"{value} {source}->{target}" for value, source, target in messages]


def test_a_task_per_compute_and_a_message_per_send_between_devices() -> None:
    graph, messages = tasks()
    assert [str(action) for action in graph.actions] == ["0F0", "0B0", "1F0", "1B0"]
    assert messages == ["v0#0 0->1", "v0'1#0 1->0"], "the host's transfers are not messages"
    assert graph.links == [(0, 1), (1, 0)]
    assert graph.delays == [2.0, 2.0]
    assert graph.sends == [(0,), (), (), (1,)]
    assert graph.needs == [(), (1,), (0,), ()]
    assert graph.label(1) == "v0'1#0"


def test_values_count_from_their_write_to_their_free() -> None:
    """On device 0: x from the beginning to the end of 0F0; v0 until its transfer ends; what 0F0 saves until 0B0 ends."""
    graph, _ = tasks()
    sizes = sorted(size for _, size in graph.changes[0])
    assert sizes == [-100.0, -10.0, -10.0, -5.0, 5.0, 10.0, 10.0, 100.0]
    assert ((), 5.0) in graph.changes[0]
    assert (((Anchor.TASK_START, 0),), 100.0) in graph.changes[0]
    assert (((Anchor.TASK_END, 0), (Anchor.MESSAGE_END, 0)), -10.0) in graph.changes[0]
    assert (((Anchor.MESSAGE_START, 1),), 10.0) in graph.changes[0], (
        "a received gradient counts from the start of its transfer"
    )
    assert sum(size for _, size in graph.changes[0]) == sum(size for _, size in graph.changes[1]) == 0.0


def test_a_tie_is_broadcast_by_its_home_and_reduced_to_it() -> None:
    ties = (Tie("w", (0, 1), 8.0),)
    program = lower(SCHEDULE, ROUTES, ties=ties)
    graph, messages = tasks_and_messages(program, make_costs(2, 2, ROUTES, ties))
    exchanged = [(str(what), source, target) for what, source, target in messages if "w" in str(what)]
    assert exchanged == [("BROADCAST w", 0, 1), ("REDUCE w", 1, 0)]
    waits = [task for task, action in enumerate(graph.actions) if action is None]
    assert [graph.links[message] for task in waits for message in graph.needs[task]] == [(1, 0), (0, 1)]
    assert all(graph.seconds[task] == 0.0 for task in waits)


def test_tasks_of_program_are_the_same_without_the_messages() -> None:
    program, costs = lower(SCHEDULE, ROUTES), make_costs(2, 2, ROUTES)
    first, (second, _) = tasks_of_program(program, costs), tasks_and_messages(program, costs)
    assert (first.rows, first.needs, first.sends, first.changes) == (
        second.rows,
        second.needs,
        second.sends,
        second.changes,
    )
