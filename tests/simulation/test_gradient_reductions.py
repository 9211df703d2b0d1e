"""Reductions beside backwards: when they begin, one after the other on a device, and what they add to the step."""

from __future__ import annotations

import pytest

from pipecompile.ir import Tie
from pipecompile.passes import lower
from pipecompile.passes.sharding import insert_sharding
from pipecompile.schedules import build_schedule
from pipecompile.simulation.gradient_reductions import gradient_ends, last_ends, reduced_makespan, row_ends
from pipecompile.simulation.simulator import build_tasks, run_to_end


def test_ends_are_those_of_the_last_backward_of_each_stage() -> None:
    schedule = build_schedule("gpipe", 2, 2)  # stage 0: F F . . . . B B, stage 1: . F F B B, in units F 1 and B 2
    tasks, costs = build_tasks(schedule)
    ends = last_ends(tasks, run_to_end(schedule, tasks, costs))
    assert ends == {1: 7.0, 0: 9.0}


def test_a_device_reduces_one_stage_after_the_other() -> None:
    ends, placement = {0: 10.0, 1: 4.0, 2: 6.0}, (0, 0, 1)
    assert reduced_makespan(ends, placement, [1.0, 2.0, 1.0]) == 11.0  # stage 1 is reduced beside the backwards
    assert reduced_makespan(ends, placement, [1.0, 9.0, 1.0]) == 14.0  # stage 0 waits for it
    assert reduced_makespan(ends, placement, [0.0, 0.0, 30.0]) == 36.0


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_without_reductions_the_step_is_that_of_the_pipeline(name: str) -> None:
    schedule = build_schedule(name, 4, 8)
    tasks, costs = build_tasks(schedule)
    times = run_to_end(schedule, tasks, costs)
    assert reduced_makespan(last_ends(tasks, times), schedule.placement, [0.0] * 4) == times.makespan


def test_gradients_are_complete_when_the_collective_of_their_reduction_is_over() -> None:
    schedule = insert_sharding(build_schedule("gpipe", 2, 2))
    tasks, costs = build_tasks(schedule, reduce_grad=5.0)
    times = run_to_end(schedule, tasks, costs)
    assert gradient_ends(tasks, times) == {1: 7.0 + 5.0, 0: 9.0 + 5.0}
    assert row_ends(tasks, times) == [9.0, 7.0]


def test_a_row_ends_with_the_gradients_of_ties() -> None:
    program = lower(build_schedule("gpipe", 2, 2), ties=[Tie("w", (0, 1))])
    tasks, costs = build_tasks(program, transfer={"v0": 0.0, "w": 5.0})
    assert row_ends(tasks, run_to_end(program, tasks, costs)) == [11.0 + 5.0, 11.0]
