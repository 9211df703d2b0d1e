"""User constraints are met, their cost is computed, and contradictions are named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from partitioners.oracle import legal_assignments, problems

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.partitioners import Node, Problem, partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.constraints import check_constraints, stage_ranges


def chain(**fields) -> Problem:
    return Problem(
        tuple(Node(x, 1.0) for x in "abcdef"), precedence=tuple(zip("abcde", "bcdef", strict=True)), **fields
    )


def stages_of(problem: Problem, n_stages: int, method: str = "auto") -> str:
    result = partition(problem, n_stages, method=method)
    result.verify(problem, n_stages)
    return "".join(str(result.stage_of[x]) for x in "abcdef")


@pytest.mark.parametrize("method", ["dp", "ilp", "auto"])
@pytest.mark.parametrize(
    ("fields", "stages"),
    [
        ({}, "001122"),
        ({"pins": {"d": 2}}, "001222"),
        ({"pins": {"a": 1}}, "111222"),
        ({"apart": (("a", "b"), ("b", "c"))}, "012222"),
        ({"apart": (("e", "f"),), "pins": {"e": 0}}, "000001"),
    ],
)
def test_pins_and_pairs_apart_are_obeyed(fields, stages, method):
    problem = chain(**fields)
    result, wanted = stages_of(problem, 3, method), stages
    assert max(map(result.count, "012")) == max(map(wanted.count, "012"))
    assert all(int(result["abcdef".index(name)]) == stage for name, stage in problem.pins.items())


def message(problem: Problem, n_stages: int) -> str:
    with pytest.raises(InfeasibleError) as caught:
        partition(problem, n_stages)
    return str(caught.value)


def test_contradictions_are_named_with_the_chain_that_causes_them():
    text = message(chain(pins={"b": 2, "e": 1}), 3)
    assert (
        "'b' is pinned to stage 2 and 'e' is pinned to stage 1, expected 2 or later: 'b' -> 'c' -> 'd' -> 'e'" in text
    )
    text = message(chain(apart=(("a", "c"), ("c", "d"), ("d", "f"))), 3)
    assert "'a' < 'c' < 'd' < 'f': 4 stages are needed, n_stages is 3" in text
    text = message(chain(groups=(("a", "d"),), apart=(("b", "c"),)), 3)
    assert "'b' must be in a stage before 'c', yet shares one with it: 'c' -> 'd' -> 'a' -> 'b'" in text
    text = message(chain(groups=(("a", "d"),), pins={"a": 0, "c": 1}), 3)
    assert "'a' to 0 and 'c' to 1 are pinned to different stages, yet share a stage: 'a' -> 'b' -> 'c'" in text
    text = message(chain(apart=(("d", "b"),)), 3)
    assert "'d' must be in a stage before 'b', yet shares one with it: 'b' -> 'c' -> 'd'" in text


def test_all_contradictions_are_reported_at_once():
    text = message(chain(pins={"b": 2, "c": 1, "d": 2, "e": 0}), 3)
    assert text.count("expected") == 2


def test_a_pin_beyond_the_last_stage_is_an_input_error():
    with pytest.raises(InputError, match="'c' is pinned to stage 5, but n_stages is 3"):
        partition(chain(pins={"c": 5}), 3)


@settings(max_examples=120, deadline=None)
@given(problems(memory=False))
def test_constraints_are_refused_exactly_if_no_cut_meets_them(case):
    problem, n_stages = case
    clusters = coarsen(problem)
    legal = list(legal_assignments(problem, n_stages))
    if not legal:
        with pytest.raises(InfeasibleError):
            check_constraints(problem, clusters, n_stages)
        return
    check_constraints(problem, clusters, n_stages)
    first, last = stage_ranges(clusters, n_stages) or ([0] * len(clusters), [n_stages - 1] * len(clusters))
    for v, names in enumerate(clusters.members):
        assert {stage_of[names[0]] for stage_of in legal} <= set(range(first[v], last[v] + 1))
