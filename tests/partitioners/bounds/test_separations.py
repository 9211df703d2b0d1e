"""Separated pairs: work, tensors, memory and pairs apart, and their closure by precedence."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import legal_assignments, loads_of, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.separations import contract, minimal_pairs, separated_pairs
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen, transitive_closure
from pipecompile.partitioners.machine import Machine


def chain(n: int, *, time: float = 2.0, size: float = 0.0, tensor: float = 0.0, **fields) -> Problem:
    names = [f"v{i}" for i in range(n)]
    pairs = tuple(zip(names, names[1:], strict=False))
    nodes = tuple(Node(name, time, size) for name in names)
    return Problem(nodes, precedence=pairs, tensors=tuple(Tensor(a, (b,), tensor) for a, b in pairs), **fields)


def separated(problem: Problem, target: float) -> list[tuple[int, int]]:
    clusters, machine = coarsen(problem), Machine.of(problem, 4)
    return minimal_pairs(clusters, separated_pairs(clusters, machine, target, transitive_closure(clusters)))


def test_too_much_work_for_one_stage_separates_its_ends() -> None:
    assert separated(chain(4), 5.0) == [(0, 2), (1, 3)]
    assert separated(chain(4), 7.0) == [(0, 3)]
    assert separated(chain(4), 9.0) == []


def test_after_the_deadline_the_rounds_that_need_products_are_left_out() -> None:
    problem = chain(4, tensor=1.0)  # tensors separate the inner two: the second round
    clusters, machine = coarsen(problem), Machine.of(problem, 4)
    closure = transitive_closure(clusters)

    late = separated_pairs(clusters, machine, 5.5, closure, deadline=0.0)

    assert (1, 2) not in minimal_pairs(clusters, late)
    assert not (late & ~separated_pairs(clusters, machine, 5.5, closure)).any(), "what is left is separated"
    assert compute_windows(clusters, machine, 5.5, 0.0).closure is None


def test_tensors_to_separated_clusters_count_as_well() -> None:
    #  2 ── 2 ── 2 ── 2    three make 6, so the inner two, 4, send and receive 1 each
    assert separated(chain(4, tensor=1.0), 5.5) == [(1, 2)]
    assert separated(chain(4, tensor=1.0), 7.5) == [(0, 3)]
    assert separated(chain(4, tensor=1.0), 8.5) == []
    assert separated(chain(4, tensor=1.0, overlap=True), 5.5) == [(0, 2), (1, 3)], "with overlap, work alone counts"


def test_without_a_target_memory_and_pairs_apart_separate() -> None:
    assert separated(chain(4, size=10.0, memory_limit=25.0), 0.0) == [(0, 2), (1, 3)]
    assert separated(chain(4, apart=(("v1", "v2"),)), 0.0) == [(1, 2)]
    assert separated(chain(4), 0.0) == []


def test_ancestors_and_descendants_of_a_separated_pair_are_separated() -> None:
    clusters = coarsen(problem := chain(4, apart=(("v1", "v2"),)))
    pairs = separated_pairs(clusters, Machine.of(problem, 4), 0.0, transitive_closure(clusters))
    assert {(int(a), int(b)) for a, b in zip(*pairs.nonzero(), strict=True)} == {(0, 2), (0, 3), (1, 2), (1, 3)}


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
