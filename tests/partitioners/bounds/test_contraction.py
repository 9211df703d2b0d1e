"""What is melted below a target was never apart below it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.contraction import contract
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine

DRAWN = Problem((Node("u", 35.0), Node("v", 10.0)), tensors=(Tensor("u", ("v",), 40.0),))


def test_the_drawn_case_and_its_limit():
    clusters, machine = coarsen(DRAWN), Machine.of(DRAWN, 2)
    assert contract(clusters, machine, 70.0).members == (("u", "v"),)
    assert contract(clusters, machine, 75.0).members == (("u", "v"),)
    assert contract(clusters, machine, 75.1).members == (("u",), ("v",))


@settings(max_examples=60, deadline=None)
@given(problems(memory=False, max_nodes=7), st.floats(1.0, 30.0))
def test_every_cut_below_the_target_keeps_melted_clusters_together(case, target):
    problem, n_stages = case
    melted = contract(coarsen(problem), Machine.of(problem, n_stages), target)
    for stage_of in legal_assignments(problem, n_stages):
        if max(load for load, _ in loads_of(problem, stage_of, n_stages)) < target * (1 - 1e-9):
            assert all(len({stage_of[name] for name in names}) == 1 for names in melted.members)
