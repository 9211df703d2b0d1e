"""Row by row or by events, the times are the same bit for bit, and those of an independent slow simulation."""

from __future__ import annotations

import random
from random import Random

import pytest
from damages import random_schedule
from fixed_point_times import fixed_point_times
from task_graphs import graph

from pipecompile.ir import chain
from pipecompile.passes import lower
from pipecompile.simulation.event_walk import walk_events
from pipecompile.simulation.row_walk import walk_rows
from pipecompile.simulation.simulator import build_tasks
from pipecompile.simulation.task_graph import NEVER, TaskGraph


def drawn_graph(seed: int) -> TaskGraph:
    """Return the tasks of a schedule or of its program, under costs of which some are 0 or equal."""
    rng = Random(seed)
    schedule = random_schedule(rng)
    names = ("forward", "input_grad", "weight_grad", "recompute", "offload", "unshard", "reduce_grad")
    costs = {name: [rng.choice([0.0, 1.0, 1.0, rng.random()]) for _ in range(schedule.n_stages)] for name in names}
    transfer = {route.value: rng.choice([0.0, 0.5, rng.random()]) for route in chain(schedule.n_stages)}
    subject = lower(schedule) if seed % 2 else schedule
    return build_tasks(subject, transfer=transfer, **costs)[0]


@pytest.mark.parametrize("seed", range(40))
def test_times_causes_and_order_are_those_by_events_and_of_the_slow_simulation(seed: int) -> None:
    tasks = drawn_graph(seed)
    by_events = walk_events(tasks)
    by_rows = walk_rows(tasks, lambda: by_events.order)
    assert by_rows == by_events
    assert by_rows.order == by_events.order
    assert by_rows.is_complete
    assert fixed_point_times(tasks) == (by_rows.start, by_rows.end, by_rows.message_start, by_rows.message_end)


def test_the_order_of_messages_follows_from_times_if_no_task_takes_none() -> None:
    rng = random.Random(0)
    for seed in range(20):
        tasks = drawn_graph(2 * seed)
        tasks.seconds = [rng.choice([0.5, 1.0, 2.0]) for _ in tasks.seconds]
        assert walk_rows(tasks, list).order == walk_events(tasks).order


def test_rows_that_wait_for_each_other_stop_where_events_stop() -> None:
    tasks = graph([[1.0, 1.0, 1.0], [1.0, 1.0]], [(0, 3, 1.0), (2, 4, 1.0), (4, 1, 1.0)], [(0, 1), (0, 1), (1, 0)])
    times = walk_rows(tasks, list)
    assert times == walk_events(tasks)
    assert times.order == walk_events(tasks).order == [0]
    assert not times.is_complete
    assert times.cause.count(NEVER) == 3
