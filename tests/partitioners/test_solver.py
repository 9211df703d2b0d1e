"""`partition`: published optima, brute force, correct status, refused arguments."""

from __future__ import annotations

import ast
import itertools
import json
import random
from dataclasses import FrozenInstanceError
from math import inf
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitioners.oracle import brute_force, degenerate_problems, dense_blocks, loads_of, problems

import pipecompile.partitioners
from pipecompile.errors import InfeasibleError, InputError, VerifyError
from pipecompile.partitioners import Node, Partition, Problem, Tensor, partition, solver, stage_loads
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.solver import trivial_lower_bound

REFERENCE = {path.stem: path for path in sorted((Path(__file__).parent / "reference").glob("*.json"))}
CHAIN = Problem(
    tuple(Node(f"v{i}", float(i % 5 + 1)) for i in range(30)),
    precedence=tuple((f"v{i}", f"v{i + 1}") for i in range(29)),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("n_stages", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("method", ["dp", "auto", "ilp"])
@pytest.mark.parametrize("name", REFERENCE)
def test_published_optima(name, method, n_stages):
    problem, published = Problem.load(REFERENCE[name]), json.loads(REFERENCE[name].read_text())["optima"][str(n_stages)]
    if published is None:
        with pytest.raises(InfeasibleError):
            partition(problem, n_stages, method=method)
        return
    result = partition(problem, n_stages, method=method, time_limit=60.0, gap=0)
    result.verify(problem, n_stages)
    assert result.bottleneck == pytest.approx(max(load for load, _ in loads_of(problem, result.stage_of, n_stages)))
    assert result.bottleneck >= published * (1 - 1e-6)
    assert result.lower_bound <= published * (1 + 1e-6)
    if method != "dp" or result.status == "optimal":
        assert result.bottleneck == pytest.approx(published, rel=1e-6)
        assert result.status == "optimal"


@settings(max_examples=150, deadline=None)
@given(problems())
def test_all_methods_against_brute_force(case):
    check_all_methods(*case)


@settings(max_examples=15, deadline=None)
@given(st.one_of(dense_blocks(), problems(max_nodes=12)))
def test_all_methods_against_brute_force_up_to_twelve_nodes(case):
    check_all_methods(*case)


@settings(max_examples=120, deadline=None)
@given(degenerate_problems())
def test_degenerate_problems_against_brute_force(case):
    check_all_methods(*case)


@pytest.mark.parametrize("n_towers", [2, 3])
def test_parallel_towers_of_equal_cost(n_towers):
    """No boundary has a down-set below some targets: every tower counts as much as every other."""
    names = [[f"t{i}.{j}" for j in range(6)] for i in range(n_towers)]
    arcs = [pair for tower in names for pair in itertools.pairwise([*tower, "head"])]
    nodes = tuple(Node(name, 1.0) for tower in names for name in tower)
    problem = Problem((*nodes, Node("head", 1.0)), tuple(arcs), tuple(Tensor(a, (b,), 0.25) for a, b in arcs))
    for n_stages in (2, 3, 4, 5):
        result = partition(problem, n_stages, gap=0)
        result.verify(problem, n_stages)
        assert result.status == "optimal"


def check_all_methods(problem: Problem, n_stages: int) -> None:
    """Assert that no method beats the optimum, that the integer program reaches it, and that bounds hold."""
    optimum, _ = brute_force(problem, n_stages)
    if optimum == inf:
        with pytest.raises(InfeasibleError):
            partition(problem, n_stages)
        return
    partitions = {method: partition(problem, n_stages, method=method, gap=0) for method in ("dp", "ilp", "auto")}
    for method, result in partitions.items():
        result.verify(problem, n_stages)
        assert result.lower_bound <= min(result.bottleneck, optimum * (1 + 1e-9) + 1e-12)
        assert result.bottleneck >= optimum * (1 - 1e-9)
        if method != "dp" or result.status == "optimal":
            assert result.status == "optimal"
            assert result.bottleneck == pytest.approx(optimum, rel=1e-6)


def test_a_chain_needs_no_integer_program():
    result = partition(CHAIN, 4, method="dp")
    assert (result.method, result.status) == ("dp", "optimal")
    stages = [result.stage_of[f"v{i}"] for i in range(30)]
    assert stages == sorted(stages)
    assert partition(CHAIN, 4).bottleneck == result.bottleneck


def test_more_stages_than_nodes_and_no_node_at_all():
    assert partition(Problem((Node("a", 3.0),)), 5).bottleneck == 3.0
    empty = partition(Problem(()), 2)
    assert (empty.stage_of, empty.bottleneck, empty.status) == ({}, 0.0, "optimal")


def test_times_of_zero_are_optimal_at_once():
    for method in ("dp", "ilp", "auto"):
        result = partition(Problem((Node("a"), Node("b")), tensors=(Tensor("a", ("b",), 1.0),)), 2, method=method)
        assert (result.bottleneck, result.lower_bound, result.status) == (0.0, 0.0, "optimal")


def tangle(layers: int, width: int) -> Problem:
    """Return layers of nodes that each consume two of the layer before: windows do not help, and down-sets are too many."""
    draw = random.Random(0)
    rows = [[f"v{layer}.{place}" for place in range(width)] for layer in range(layers)]
    nodes = tuple(Node(name, draw.uniform(1.0, 9.0)) for row in rows for name in row)
    pairs = [(a, b) for above, row in zip(rows, rows[1:], strict=False) for b in row for a in draw.sample(above, 2)]
    readers = {a: tuple(b for c, b in pairs if c == a) for a, _ in pairs}
    return Problem(nodes, tuple(pairs), tuple(Tensor(a, users, draw.uniform(0.5, 4.0)) for a, users in readers.items()))


def test_a_time_limit_is_kept_and_the_status_is_correct():
    problem = tangle(layers=20, width=12)
    result = partition(problem, 6, method="ilp", time_limit=0.3)
    result.verify(problem, 6)
    assert result.seconds < 5.0
    assert result.status == "feasible"
    assert 0 < result.lower_bound < result.bottleneck


@pytest.mark.parametrize("n_stages", [0, -1, 2.0, "2", True, None])
def test_n_stages_is_a_whole_number(n_stages):
    with pytest.raises(InputError, match="n_stages"):
        partition(CHAIN, n_stages)


def test_other_arguments_are_refused_with_the_alternatives():
    with pytest.raises(InputError, match="'auto', 'dp', 'ilp'"):
        partition(CHAIN, 2, method="magic")
    with pytest.raises(InputError, match="time_limit"):
        partition(CHAIN, 2, time_limit=0.0)
    with pytest.raises(InputError, match="gap"):
        partition(CHAIN, 2, gap=1.0)
    with pytest.raises(VerifyError, match="appears 2 times"):
        partition(Problem((Node("a"), Node("a"))), 2)


def test_a_partition_is_frozen_and_verifies_itself():
    result = partition(CHAIN, 2)
    with pytest.raises(FrozenInstanceError):
        result.bottleneck = 0.0
    broken = Partition({**result.stage_of, "v0": 1}, 1.0, 1.0, "optimal", "dp", 0.0)
    with pytest.raises(VerifyError, match="'v0' precedes 'v1'"):
        broken.verify(CHAIN, 2)


def test_nothing_here_imports_torch():
    for path in Path(pipecompile.partitioners.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(module.split(".")[0] == "torch" for module in modules), path


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_bound_is_below_the_optimum(case):
    assert trivial_lower_bound(coarsen(case[0]), Machine.of(*case)) <= brute_force(*case)[0]


@pytest.mark.parametrize(
    ("times", "speed", "bound"),
    [((2.0, 2.0, 2.0), None, 3.0), ((5.0, 1.0), None, 5.0), ((5.0, 1.0), (1.0, 5.0), 1.0), ((), None, 0.0)],
)
def test_even_share_and_heaviest_cluster(times, speed, bound):
    problem = Problem(tuple(Node(str(i), time) for i, time in enumerate(times)), speed=speed)
    assert trivial_lower_bound(coarsen(problem), Machine.of(problem, 2)) == pytest.approx(bound)


def test_the_search_ends_at_the_gap_and_says_what_is_proven():
    problem = Problem.load(REFERENCE["OperatorGraphs__bert_l-6_inference"])
    exact, near = (partition(problem, 6, method="ilp", time_limit=60.0, gap=gap) for gap in (0, 0.05))
    assert exact.status == "optimal"
    assert near.gap <= 0.05
    assert exact.bottleneck <= near.bottleneck <= exact.bottleneck / (1 - 0.05)
    assert near.lower_bound <= exact.bottleneck * (1 + 1e-6)


def test_moves_after_the_search_take_what_is_left_of_the_limit(monkeypatch):
    """They took up to a second after it."""
    ends: list[float] = []

    def no_moves(clusters, machine, assignment, ranges, deadline):
        ends.append(deadline - monotonic())
        return assignment

    monkeypatch.setattr(solver, "shorten_paths", no_moves)
    problem = Problem(tuple(Node(name, 1.0) for name in "abcdef"), (("a", "b"), ("b", "c")))
    partition(problem, 3, time_limit=1e-3)
    partition(problem, 3, time_limit=60.0)
    assert ends[0] <= solver.LEAST_PATH_SECONDS < ends[1] <= solver.PATH_SECONDS


def test_the_bottleneck_is_that_of_the_cut_to_the_last_bit():
    times = {"n0": 0.0, "n1": 0.9802743412342171, "n2": 7.3e-10, "n3": 0.9299897215453305, "n4": 376148697.9454895}
    problem = Problem(
        tuple(Node(name, time) for name, time in times.items()), (("n4", "n0"), ("n4", "n3"), ("n4", "n1"), ("n3", "n1")),
        (Tensor("n4", ("n0", "n3", "n1"), 0.2),), apart=(("n1", "n2"),), placement=(1, 0, 1), multicast=False,
    )  # fmt: skip
    found = partition(problem, 3)
    assert found.bottleneck == max(load.load for load in stage_loads(problem, found.stage_of, 3))
    assert found.lower_bound <= found.bottleneck
