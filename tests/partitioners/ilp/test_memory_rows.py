"""Memory of devices and the choice of stages that recompute, as rows of the integer program."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from pipecompile.partitioners import Node, Problem, Shared, Tensor
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import coarsen
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.memory_rows import MemoryRows
from pipecompile.partitioners.ilp.solver_backend import Mip
from pipecompile.partitioners.ilp.step_variables import ONE, ZERO, StepVariables
from pipecompile.partitioners.ilp.traffic_rows import TrafficRows
from pipecompile.partitioners.machine import Machine

# a ─▶ b in two stages: a holds 10 bytes and 4 of activations, three micro-batches are in flight there
PROBLEM = Problem(
    (Node("a", 4.0, 10.0, 4.0, 1.0), Node("b", 4.0, 20.0, 2.0, 3.0)),
    precedence=(("a", "b"),),
    tensors=(Tensor("a", ("b",), 0.0, 5.0),),
    memory_limit=100.0,
    in_flight=(3.0, 2.0),
    pins={"a": 0, "b": 1},
)


def rows_of(problem: Problem) -> MemoryRows:
    clusters, machine = coarsen(problem), Machine.of(problem, 2)
    windows = compute_windows(clusters, machine, inf)
    steps = StepVariables(Mip(), windows.earliest.tolist(), windows.latest.tolist())
    traffic = TrafficRows(steps, clusters, machine, ConsumerCounts(clusters, windows), 1.0)
    return MemoryRows(steps, clusters, machine, traffic, 1.0, 1.0, 100.0)


def least_memory(rows: MemoryRows, device: int) -> float:
    return rows.steps.mip.minimise(rows.memory(device), 10.0).bound


def test_permanent_bytes_activations_and_buffers() -> None:
    rows = rows_of(PROBLEM)
    assert rows.members == [[0], [1]]
    assert least_memory(rows, 0) == pytest.approx(10 + 3 * 4)
    assert least_memory(rows, 1) == pytest.approx(20 + 2 * (2 + 5))


def test_shared_bytes_count_on_each_device_with_a_user() -> None:
    rows = rows_of(replace(PROBLEM, shared=(Shared(("b",), 7.0),)))
    assert least_memory(rows, 0) == pytest.approx(22)
    assert least_memory(rows, 1) == pytest.approx(41)


def test_a_stage_that_recomputes_holds_its_activations_once_and_repeats_its_forward() -> None:
    rows = rows_of(replace(PROBLEM, recompute=(True, False)))
    assert rows.recompute == [ONE, ZERO]
    assert least_memory(rows, 0) == pytest.approx(10 + 4)
    assert rows.recompute_time(0).evaluate([]) == 1.0
    assert rows.recompute_time(1) is ZERO


def test_the_solver_decides_where_recomputation_saves_memory() -> None:
    rows = rows_of(replace(PROBLEM, recompute="auto"))
    choice = rows.recompute[0]
    memory, mip = rows.memory(0), rows.steps.mip
    assert mip.minimise(memory, 10.0).bound == pytest.approx(10 + 4)
    assert mip.minimise(memory + choice * 100.0, 10.0).bound == pytest.approx(10 + 3 * 4)
    time = rows.recompute_time(0)
    mip.add_row(13.9 + 1.0, memory)
    assert mip.minimise(time, 10.0).bound == pytest.approx(1.0), "only a stage that recomputes fits in 14.9 bytes"
    alone = rows_of(replace(PROBLEM, recompute="auto", in_flight=(1.0, 1.0)))
    assert alone.recompute == [ZERO, ZERO], "one micro-batch in flight: nothing to save"
