"""Branch and bound over the cuts of a small graph: the shortest estimates of brute force, and none for a large graph."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.short_cuts import MAX_CLUSTERS, add_short_cuts
from pipecompile.partitioners.step_objective import Score, StepObjective

MOST = 5


def objective_of(problem: Problem, n_stages: int, *, is_split: bool = False, microbatches: int = 4) -> StepObjective:
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    return StepObjective(clusters, machine, problem.placement or tuple(range(n_stages)), microbatches, is_split)


@settings(max_examples=25, deadline=None)
@given(case=problems(direct=True))
@pytest.mark.parametrize(("is_split", "microbatches"), [(False, 4), (True, 4), (False, 1)])
def test_the_shortest_estimates_are_those_of_brute_force(case: tuple[Problem, int], is_split: bool, microbatches: int):
    problem, n_stages = case
    objective = objective_of(problem, n_stages, is_split=is_split, microbatches=microbatches)
    clusters, n_used = objective.clusters, min(n_stages, len(objective.clusters))
    cuts = {tuple(each[names[0]] for names in clusters.members) for each in legal_assignments(problem, n_stages)}
    if any(a == b for a, b in clusters.strict_arcs):
        return  # a contradiction, which the partitioner refuses
    best = sorted(objective.score(cut)[0] for cut in cuts if len(set(cut)) == n_used)[:MOST]
    found: dict[tuple[int, ...], Score] = {}
    assert add_short_cuts(objective, stage_ranges(clusters, n_stages), found, MOST, 100_000)
    assert set(found) <= cuts
    assert all(score == objective.score(cut) for cut, score in found.items())
    finite = [seconds for seconds in best if seconds < inf]
    assert sorted(seconds for seconds, _ in found.values())[: len(finite)] == pytest.approx(finite, rel=1e-8)


def test_known_cuts_count_and_visits_are_limited() -> None:
    times = [7.0, 3.0, 5.0, 2.0, 6.0, 4.0, 8.0]
    objective = objective_of(Problem(tuple(Node(f"v{i}", time) for i, time in enumerate(times))), 3)
    found: dict[tuple[int, ...], Score] = {}
    assert not add_short_cuts(objective, None, found, MOST, 50)
    assert add_short_cuts(objective, None, found, MOST, 100_000)
    again = dict(found)
    assert add_short_cuts(objective, None, again, MOST, 100_000)
    assert again == found


def test_large_graphs_are_left_alone() -> None:
    objective = objective_of(Problem(tuple(Node(f"v{i}", 1.0) for i in range(MAX_CLUSTERS + 1))), 3)
    found: dict[tuple[int, ...], Score] = {}
    assert not add_short_cuts(objective, None, found, MOST, 1_000)
    assert found == {}
