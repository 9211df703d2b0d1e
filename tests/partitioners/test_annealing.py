"""Annealing finds cuts that single improving moves do not reach, keeps to pins, and makes the same moves every time."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from partitioners.oracle import problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.annealing import annealed_cuts
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.step_objective import StepObjective
from pipecompile.partitioners.verify import verify_assignment


def grid(seed: int, rows: int = 4, columns: int = 5) -> Problem:
    """Return a grid of operations of random seconds, each of which needs those above and to the left."""
    draw = Random(seed)
    names = [[f"n{r}_{c}" for c in range(columns)] for r in range(rows)]
    pairs = [(names[r][c], names[r][c + 1]) for r in range(rows) for c in range(columns - 1)]
    pairs += [(names[r][c], names[r + 1][c]) for r in range(rows - 1) for c in range(columns)]
    nodes = [Node(name, time, forward=time / 3) for row in names for name in row for time in [draw.uniform(1, 5)]]
    return Problem(tuple(nodes), tuple(pairs), tuple(Tensor(a, (b,), draw.uniform(0, 3)) for a, b in pairs))


def objective(problem: Problem, n_stages: int, microbatches: int = 8) -> StepObjective:
    return StepObjective(coarsen(problem), Machine.of(problem, n_stages), tuple(range(n_stages)), microbatches)


def test_a_cut_of_a_grid_becomes_much_shorter():
    for seed in range(3):
        estimate = objective(grid(seed), 3)
        start = [0] * len(estimate.clusters)
        found = annealed_cuts(estimate, [start], None, 3000, 5)
        assert len(found) == 5
        assert all(score == estimate.score(cut) for cut, score in found.items())
        assert min(found.values())[0] < 0.6 * estimate.score(start)[0]
        assert found == annealed_cuts(estimate, [start], None, 3000, 5)


@settings(max_examples=25, deadline=None)
@given(problems(direct=True))
def test_cuts_are_legal(case):
    problem, n_stages = case
    if problem.placement is not None or problem.apart or problem.pins:
        return
    estimate = objective(problem, n_stages)
    for cut in annealed_cuts(estimate, [[0] * len(estimate.clusters)], None, 200, 10):
        if estimate.score(cut)[0] < float("inf"):
            verify_assignment(problem, estimate.clusters.stage_by_node(cut), n_stages)


def test_a_pin_holds():
    pinned = Problem(grid(0).nodes, grid(0).precedence, pins={"n1_1": 1})
    estimate = objective(pinned, 3)
    ranges = stage_ranges(estimate.clusters, 3)
    assert ranges is not None
    start = list(ranges[0])
    place = next(i for i, members in enumerate(estimate.clusters.members) if "n1_1" in members)
    found = annealed_cuts(estimate, [start], ranges, 1000, 20)
    assert len(found) == 20
    assert {cut[place] for cut in found} == {1}


def test_operations_that_take_no_time_are_left_where_they_are():
    free = Problem(tuple(Node(f"n{i}", 0.0) for i in range(4)))
    assert list(annealed_cuts(objective(free, 2), [[0, 0, 1, 1]], None, 100, 5)) == [(0, 0, 1, 1)]
