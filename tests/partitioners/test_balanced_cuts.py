"""Balanced cuts: all that precedence, constraints and the cap allow, each once, and none for a large graph."""

from __future__ import annotations

from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.partitioners import Node, Problem
from pipecompile.partitioners.balanced_cuts import CAPS, MAX_CLUSTERS, balanced_cuts
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import stage_ranges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.step_objective import StepObjective


def listed(problem: Problem, n_stages: int, most: int = 100_000) -> list[dict[str, int]]:
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    objective = StepObjective(clusters, machine, problem.placement or tuple(range(n_stages)), 4)
    return [clusters.stage_by_node(c) for c in balanced_cuts(objective, stage_ranges(clusters, n_stages), most)]


@settings(max_examples=40, deadline=None)
@given(problems(direct=True))
def test_the_cuts_are_those_of_brute_force_below_the_cap(case):
    problem, n_stages = case
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    device_of = problem.placement or tuple(range(n_stages))
    speed = [machine.speed[device] for device in range(max(device_of) + 1)]
    time, found = {node.name: node.time for node in problem.nodes}, listed(problem, n_stages)

    def is_balanced(stage_of: dict[str, int]) -> bool:
        work = [0.0] * len(speed)
        for name, stage in stage_of.items():
            work[device_of[stage]] += time[name]
        share = CAPS[-1] * sum(time.values()) / sum(speed) * (1 + 1e-9)
        return all(w <= share * s for w, s in zip(work, speed, strict=True))

    every = [each for each in legal_assignments(problem, n_stages) if is_balanced(each)]
    every = [each for each in every if len(set(each.values())) == min(n_stages, len(clusters))]
    by_name = lambda cut: sorted(cut.items())  # noqa: E731
    assert sorted(map(by_name, found)) == sorted(map(by_name, every))


def test_the_number_of_cuts_is_limited_and_large_graphs_have_none():
    chain = [Node(f"v{i}", 1.0) for i in range(12)]
    assert len(listed(Problem(tuple(chain)), 3, most=50)) == 50
    assert listed(Problem(tuple(Node(f"v{i}", 1.0) for i in range(MAX_CLUSTERS + 1))), 3) == []
