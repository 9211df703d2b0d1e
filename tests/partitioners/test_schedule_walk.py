"""A walk gives the seconds that a simulation of the same schedule gives, for any cut of a chain."""

from __future__ import annotations

from itertools import product

import pytest
from partitioners.test_step_objective import TOWERS, chain, objective, simulated

import pipecompile as pc
from pipecompile.partitioners import Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.schedule_walk import ScheduleWalk
from pipecompile.partitioners.step_objective import StepObjective
from pipecompile.passes.offloading import insert_offload


def walked(problem: Problem, schedule: pc.Schedule) -> StepObjective:
    walk = ScheduleWalk.of(schedule)
    assert walk is not None
    n = schedule.n_stages
    m, is_split = schedule.n_microbatches, schedule.is_split
    return StepObjective(coarsen(problem), Machine.of(problem, n), schedule.placement, m, is_split, walk)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("n_stages", [2, 3])
def test_a_walk_without_transfers_is_the_simulation(name: str, n_stages: int):
    problem, m = chain([3.0, 6.0, 1.5, 4.5, 3.0]), 6
    estimate = walked(problem, pc.build_schedule(name, n_stages, m))
    for cut in product(range(n_stages), repeat=5):
        if list(cut) == sorted(cut) and len(set(cut)) == n_stages:
            stage_of = {node.name: stage for node, stage in zip(problem.nodes, cut, strict=True)}
            times = [sum(n.time for n in problem.nodes if stage_of[n.name] == s) for s in range(n_stages)]
            seconds = estimate.walk.seconds(times, [time / 3 for time in times], estimate.edges(cut))
            assert seconds == pytest.approx(simulated(problem, stage_of, n_stages, m, name))


def pair(seconds: float) -> Problem:
    """Return two equal nodes with a transfer of so many seconds, both ways together."""
    both = chain([3.0] * 2)
    return Problem(both.nodes, both.precedence, (Tensor("n0", ("n1",), seconds),))


@pytest.mark.parametrize(("name", "m", "seconds"), [("1f1b", 8, 2.0), ("gpipe", 4, 20.0)])
def test_neighbours_wait_for_transfers_and_a_link_takes_one_after_the_other(name: str, m: int, seconds: float):
    schedule = pc.build_schedule(name, 2, m)
    measured = pc.simulate(schedule, forward=1.0, backward=2.0, transfer=seconds / 2).makespan
    assert walked(pair(seconds), schedule).score([0, 1])[0] == pytest.approx(measured)


def test_the_formulas_alone_are_too_low():
    assert (
        objective(pair(2.0), (0, 1), 8).score([0, 1])[0]
        < walked(pair(2.0), pc.build_schedule("1f1b", 2, 8)).score([0, 1])[0]
    )


def test_stages_of_towers_do_not_wait_for_each_other():
    estimate = walked(TOWERS, pc.build_schedule("1f1b", 4, 8))
    assert estimate.score([0, 1, 2, 3])[0] == 2 * 3.0 + 7 * 3.0


def test_no_cut_above_the_limit_is_walked():
    estimate = walked(pair(2.0), pc.build_schedule("1f1b", 2, 8))
    assert estimate.score([0, 1], 1.0) == objective(pair(2.0), (0, 1), 8).score([0, 1])
    assert estimate.score([0, 1], 1.0)[0] < estimate.score([0, 1])[0]


def test_schedules_with_other_actions_or_too_many_have_no_walk():
    assert ScheduleWalk.of(insert_offload(pc.build_schedule("1f1b", 4, 8))) is None
    assert ScheduleWalk.of(pc.build_schedule("1f1b", 8, 64)) is None
    assert ScheduleWalk.of(pc.build_schedule("seq1f1b", 2, 4)) is None
