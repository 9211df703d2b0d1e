from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipecompile.errors import InputError, VerifyError
from pipecompile.partitioners import partition
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck
from pipecompile.partitioners.problem import Node, Problem
from pipecompile.partitioners.rebalance import fill_empty_stages


def chain(times: list[float]) -> Problem:
    names = [f"n{i}" for i in range(len(times))]
    nodes = tuple(Node(name, time) for name, time in zip(names, times, strict=True))
    return Problem(nodes, precedence=tuple(zip(names, names[1:], strict=False)))


@pytest.mark.parametrize("method", ["dp", "ilp", "auto"])
@pytest.mark.parametrize("n_stages", range(1, 10))
def test_no_stage_of_a_chain_is_empty(method: str, n_stages: int) -> None:
    result = partition(chain([1.0] * 9), n_stages, method=method)
    assert set(result.stage_of.values()) == set(range(n_stages))
    assert result.bottleneck == -(-9 // n_stages)


@pytest.mark.parametrize("stage", [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 3, 3], [0, 0, 0, 3, 3, 3], [2, 2, 2, 2, 2, 2]])
def test_the_bottleneck_does_not_rise(stage: list[int]) -> None:
    problem = chain([1.0, 2.0, 1.0, 1.0, 3.0, 1.0])
    clusters, machine = coarsen(problem), Machine.of(problem, 4)
    result = fill_empty_stages(clusters, machine, stage)
    assert set(result) == {0, 1, 2, 3}
    assert result == sorted(result)
    assert bottleneck(clusters, machine, result) <= bottleneck(clusters, machine, stage)


def test_pinned_clusters_stay() -> None:
    problem = replace(chain([1.0] * 4), pins={"n3": 2})
    clusters, machine = coarsen(problem), Machine.of(problem, 4)
    assert fill_empty_stages(clusters, machine, [0, 0, 2, 2])[3] == 2


def test_nothing_is_tried_where_no_stage_can_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the other 998 stages was tried beside each stage, with an evaluation of all stages each."""
    count = 0

    def counted(*arguments: Any) -> float:
        nonlocal count
        count += 1
        return bottleneck(*arguments)

    problem = Problem((Node("a", 1.0), Node("b", 2.0)))
    monkeypatch.setattr("pipecompile.partitioners.rebalance.bottleneck", counted)
    clusters, machine = coarsen(problem), Machine.of(problem, 1000)
    assert sorted(fill_empty_stages(clusters, machine, [7, 7])) == [6, 7]
    assert count <= 3


def test_the_filling_ends_at_its_deadline() -> None:
    problem = chain([1.0] * 9)
    clusters, machine = coarsen(problem), Machine.of(problem, 6)
    assert fill_empty_stages(clusters, machine, [0] * 9, deadline=0.0) == [0] * 9


def test_more_stages_than_a_pipeline_can_have_are_refused() -> None:
    problem = Problem((Node("a", 1.0), Node("b", 2.0)))
    assert partition(problem, 2000, time_limit=1).bottleneck == 2.0
    with pytest.raises(InputError, match="n_stages is 1000000, expected at most 10,000"):
        partition(problem, 10**6)
    with pytest.raises(VerifyError, match="placement names device 1000000000, expected less than 100,000"):
        partition(replace(problem, placement=(0, 10**9)), 2)
