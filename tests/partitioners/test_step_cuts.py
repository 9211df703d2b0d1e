"""Cuts with a short step: found where the least bottleneck leads away from them, legal, and the same every time."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from partitioners.oracle import brute_force, legal_assignments, problems

from pipecompile.partitioners import Node, Problem, Tensor, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.step_cuts import _divisions, _filled, step_cuts
from pipecompile.partitioners.step_objective import StepObjective
from pipecompile.partitioners.verify import verify_assignment


def towers(count: int, pins: dict[str, int] | None = None) -> Problem:
    """Return towers of four layers, and a head of less work than a tower: an even cut takes parts of several."""
    nodes = [Node(f"t{t}_{i}", 1.0) for t in range(count) for i in range(4)] + [Node("cat"), Node("head", 1.0)]
    arcs = [(f"t{t}_{i}", f"t{t}_{i + 1}") for t in range(count) for i in range(3)]
    arcs += [*((f"t{t}_3", "cat") for t in range(count)), ("cat", "head")]
    return Problem(tuple(nodes), tuple(arcs), pins=pins or {})


def best_of(problem: Problem, n_stages: int, m: int) -> tuple[float, float, dict[str, int]]:
    """Return the estimated step of the cut with the least bottleneck, and that of the best cut, with the cut."""
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    stage_of = partition(problem, n_stages, method="dp", time_limit=1.0).stage_of
    start = [stage_of[names[0]] for names in clusters.members]
    objective = StepObjective(clusters, machine, tuple(range(n_stages)), m)
    cuts = step_cuts(objective, start, stage_ranges(clusters, n_stages), 4)
    assert cuts == step_cuts(objective, start, stage_ranges(clusters, n_stages), 4)
    return objective.score(start)[0], objective.score(cuts[0])[0], clusters.stage_by_node(cuts[0])


def test_towers_get_stages_of_their_own():
    before, after, stage_of = best_of(towers(7), 8, 8)
    assert after == 5.0 + 7 * 4.0
    assert before >= after
    assert sorted(len({s for name, s in stage_of.items() if name.startswith(f"t{t}_")}) for t in range(7)) == [1] * 7


def test_a_pin_holds():
    _, _, stage_of = best_of(towers(3, {"t0_0": 0, "t0_3": 2}), 4, 8)
    assert (stage_of["t0_0"], stage_of["t0_3"]) == (0, 2)


@settings(max_examples=25, deadline=None)
@given(problems(direct=True))
def test_cuts_are_legal_and_none_is_worse_than_the_start(case):
    problem, n_stages = case
    if brute_force(problem, n_stages)[0] == inf or problem.placement is not None:
        return
    before, after, stage_of = best_of(problem, n_stages, 4)
    assert after <= before
    verify_assignment(problem, stage_of, n_stages)


@settings(max_examples=25, deadline=None)
@given(problems(direct=True))
def test_small_graphs_are_close_to_the_best_of_all_cuts(case):
    problem, n_stages = case
    if brute_force(problem, n_stages)[0] == inf or problem.placement is not None:
        return
    _, after, _ = best_of(problem, n_stages, 4)
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    objective = StepObjective(clusters, machine, tuple(range(n_stages)), 4)
    every = ([stage_of[names[0]] for names in clusters.members] for stage_of in legal_assignments(problem, n_stages))
    assert after <= min(objective.score(each)[0] for each in every) * 1.15 + 1e-9


def test_a_cut_that_no_move_reaches_is_found_in_a_small_graph():
    times = {"a": 14.9, "b": 16.5, "c": 9.0, "d": 17.3, "e": 6.9, "f": 19.8, "g": 20.0}
    problem = Problem(
        tuple(Node(name, time, forward=time / 3) for name, time in times.items()),
        (("a", "b"), ("a", "c"), ("e", "f"), ("f", "g")),
    )
    clusters, machine = coarsen(problem), Machine.of(problem, 3)
    objective = StepObjective(clusters, machine, (0, 1, 2), 8, is_split=True)
    start = [partition(problem, 3).stage_of[names[0]] for names in clusters.members]
    every = ([stage_of[names[0]] for names in clusters.members] for stage_of in legal_assignments(problem, 3))
    best = min(objective.score(each) for each in every)
    assert objective.score(step_cuts(objective, start, None, 4)[0])[0] <= best[0] * (1 + 1e-9)


def test_a_cut_uses_as_many_stages_as_the_start_where_fewer_are_shorter():
    names = [f"n{i}" for i in range(6)]
    pairs = tuple(zip(names, names[1:], strict=False))
    problem = Problem(
        tuple(Node(name, 1.0, forward=0.4) for name in names), pairs, tuple(Tensor(a, (b,), 50.0) for a, b in pairs)
    )
    objective = StepObjective(coarsen(problem), Machine.of(problem, 3), (0, 1, 2), 8)
    assert objective.score([0] * 6) < objective.score([0, 0, 1, 1, 2, 2])
    assert all(len(set(cut)) == 3 for cut in step_cuts(objective, [0, 0, 1, 1, 2, 2], None, 8))


def test_a_deep_model_with_empty_stages_needs_few_estimates():
    #  600 layers in 4 of 48 stages: all divisions for all empty stages would be 6,688 estimates a round
    times = tuple(1.0 + v % 3 for v in range(600))
    nodes = tuple(Node(f"v{v}", time) for v, time in enumerate(times))
    problem = Problem(nodes, precedence=tuple((f"v{v}", f"v{v + 1}") for v in range(599)))
    objective = StepObjective(coarsen(problem), Machine.of(problem, 48), tuple(range(48)), 48)
    cut = [12 * (v // 150) for v in range(600)]
    assert len(list(_divisions(objective, cut, 10_000))) == 44 * 4 * 38
    few = list(_divisions(objective, cut, 40))
    assert 8 <= len(few) <= 48
    assert all(len(set(each)) == 5 for each in few)
    filled = _filled(objective, cut, None, 48, 400_000)
    assert len(set(filled)) == 48
    assert objective.score(filled) < objective.score(cut)
