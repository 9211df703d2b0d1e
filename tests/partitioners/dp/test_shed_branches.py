"""Parts of side branches go where there is time, and nowhere else."""

from __future__ import annotations

import pytest

from pipecompile.partitioners import Node, Problem, Tensor
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.dp.shed_branches import shed_parts
from pipecompile.partitioners.dp.side_branches import join_side_branches
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker


def shed(times: tuple[float, float, float], target: float) -> tuple[list[float], dict[str, int]]:
    """Cut a ─▶ b ─▶ c, a stage each, where c reads two tables; return loads and stages after shedding."""
    nodes = (*map(Node, "abc", times), Node("small", 1.0), Node("large", 3.0))
    tensors = (
        *(Tensor(source, (reader,), 0.25) for source, reader in ("ab", "bc")),
        *(Tensor(table, ("c",), 0.25) for table in ("small", "large")),
    )
    problem = Problem(nodes, tuple((t.source, *t.consumers) for t in tensors), tensors)
    clusters, machine = coarsen(problem), Machine.of(problem, 3)
    stage = {"a": 0, "b": 1, "c": 2, "small": 2, "large": 2}
    start = [stage[names[0]] for names in clusters.members]
    cut = shed_parts(clusters, machine, start, join_side_branches(clusters, 1.0).parts, target)
    return [load.load for load in LoadTracker(clusters, machine, cut).device_loads()], clusters.stage_by_node(cut)


def test_the_smallest_piece_that_is_enough_goes_to_the_last_stage_with_time():
    loads, stage = shed((1.0, 4.0, 1.5), 5.0)  # c has 5.75
    assert (stage["small"], stage["large"]) == (0, 2)  # b would have 5.75
    assert loads == pytest.approx([2.5, 4.5, 5.0])


def test_the_largest_goes_where_no_piece_is_enough_and_then_another():
    loads, stage = shed((2.5, 1.0, 3.0), 4.8)  # c has 7.25, and 4.5 without the large one
    assert (stage["small"], stage["large"]) == (2, 1)
    assert loads == pytest.approx([2.75, 4.75, 4.5])
    loads, stage = shed((2.5, 1.0, 4.0), 4.8)
    assert (stage["small"], stage["large"]) == (0, 1)
    assert loads == pytest.approx([4.0, 4.75, 4.75])


def test_nothing_moves_where_there_is_no_time():
    _, stage = shed((5.0, 5.0, 3.0), 5.0)
    assert (stage["small"], stage["large"]) == (2, 2)
