"""The program of one stage: how much it can hold below a target, whatever the others do."""

from __future__ import annotations

import pytest

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen, transitive_reduction
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.one_stage import StageModel, build_stage_model
from pipecompile.partitioners.machine import Machine


def chain(n: int, tensor: float = 0.0, **fields) -> Problem:
    names = [f"v{i}" for i in range(n)]
    pairs = tuple(zip(names, names[1:], strict=False))
    tensors = tuple(Tensor(a, (b,), tensor) for a, b in pairs)
    return Problem(tuple(Node(name, 1.0, 1.0) for name in names), pairs, tensors, **fields)


def stage_model(problem: Problem, n_stages: int, target: float, s: int) -> StageModel:
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    counts = ConsumerCounts(clusters, compute_windows(clusters, machine, target))
    return build_stage_model(clusters, machine, counts, transitive_reduction(clusters), target, s)


def most_work(problem: Problem, target: float) -> float:
    """Return the most work of the first of two stages, in seconds."""
    model = stage_model(problem, 2, target, 0)
    result = model.mip.minimise(model.work[0] * -1.0, 10.0)
    return -result.bound * target


def test_a_stage_has_the_work_of_its_two_boundaries() -> None:
    assert list(stage_model(chain(6), 3, 4.0, 0).work) == [0]
    assert list(stage_model(chain(6), 3, 4.0, 1).work) == [0, 1]
    assert list(stage_model(chain(6), 3, 4.0, 2).work) == [1]


def test_a_stage_holds_as_much_work_as_the_target_less_its_tensors() -> None:
    assert most_work(chain(6), 4.5) == pytest.approx(4.0)
    assert most_work(chain(6, tensor=1.0), 4.5) == pytest.approx(3.0)
    assert most_work(chain(6, tensor=1.0, overlap=True), 4.5) == pytest.approx(4.0)


def test_a_stage_holds_no_more_than_its_memory() -> None:
    assert most_work(chain(6, memory_limit=3.0), 5.5) == pytest.approx(3.0)
