"""The program of all stages has the optimum of the problem, as a fraction of the target."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from time import monotonic

import pytest
from hypothesis import given, settings
from partitioners.oracle import brute_force, problems

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.formulation import build_model
from pipecompile.partitioners.ilp.solver_backend import OutOfTimeError
from pipecompile.partitioners.machine import Machine


def solved(problem: Problem, n_stages: int, target: float, bound: float = 0.0) -> tuple[list[int] | None, float]:
    """Return the assignment and the bottleneck in seconds."""
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    windows = compute_windows(clusters, machine, target)
    if windows.is_empty:
        return None, inf
    model = build_model(clusters, machine, windows, target, bound)
    result = model.mip.minimise(model.bottleneck, 10.0)
    assignment = None if result.values is None else model.steps.assignment(result.values)
    return assignment, result.bound * target


CHAIN = Problem(
    tuple(Node(f"v{i}", time) for i, time in enumerate((3.0, 1.0, 1.0, 3.0))),
    precedence=tuple((f"v{i}", f"v{i + 1}") for i in range(3)),
    tensors=tuple(Tensor(f"v{i}", (f"v{i + 1}",), time) for i, time in enumerate((1.0, 0.5, 1.0))),
)


def test_a_chain_is_cut_in_its_middle() -> None:
    assignment, bottleneck = solved(CHAIN, 2, 6.0)
    assert assignment == [0, 0, 1, 1]
    assert bottleneck == pytest.approx(4.5)


def test_a_known_bound_is_not_undercut_and_a_low_target_has_no_solution() -> None:
    assert solved(CHAIN, 2, 6.0, bound=4.0)[1] == pytest.approx(4.5)
    assert solved(CHAIN, 2, 4.4) == (None, inf)


@settings(max_examples=25, deadline=None)
@given(problems(max_nodes=5))
def test_the_program_has_the_optimum(case) -> None:
    best, _ = brute_force(*case)
    if 0.0 < best < inf:
        assert solved(*case, best * 1.5)[1] == pytest.approx(best, rel=1e-5)


def test_a_program_is_given_up_at_the_deadline() -> None:
    names = [f"v{i}" for i in range(100)]
    problem = Problem(tuple(Node(name, 1.0) for name in names), tuple(pairwise(names)))
    clusters, machine = coarsen(problem), Machine.of(problem, 8)
    with pytest.raises(OutOfTimeError):
        build_model(clusters, machine, compute_windows(clusters, machine, 50.0), 50.0, deadline=monotonic())
