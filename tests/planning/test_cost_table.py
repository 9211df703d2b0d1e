"""Costs by micro-batch size: which sizes are measured, in what order, and with whose model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import pipecompile as pc
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.costs import NodeCost, analytic_costs, profile
from pipecompile.costs.profile import REPEATS
from pipecompile.graph.colocation import compute_nodes
from pipecompile.planning import cost_table
from pipecompile.planning.cost_table import (
    MeasuredCosts,
    by_distance_to_default,
    hint_at_small_microbatches,
    measure_costs,
    samples_of,
)
from tests.support.compilations import layers, mini_batch, options_of

MODEL = layers(2)
GRAPH = pc.trace(MODEL, torch.zeros(4, 4))


def batches(*counts: int, samples: int = 12) -> list[MiniBatch]:
    return [mini_batch(MODEL, count, torch.zeros(samples, 4)) for count in counts]


def linear(graph: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, NodeCost]:
    """Return costs of a second per sample."""
    return {node.name: NodeCost(len(inputs[0]), 0.0, 0, 0) for node in compute_nodes(graph)}


def test_samples_are_those_of_the_largest_micro_batch() -> None:
    (batch,) = batches(5)
    assert samples_of(batch) == 3
    assert samples_of(mini_batch(nn.Identity(), 1, 5)) is None


def test_numbers_near_the_default_come_first() -> None:
    ordered = by_distance_to_default(batches(1, 2, 3, 4, 6, 12), options_of())
    assert [len(batch.sizes) for batch in ordered] == [4, 3, 6, 2, 12, 1]


def test_each_size_is_measured_once_with_its_own_inputs() -> None:
    seen: list[int] = []

    def counted(graph: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, NodeCost]:
        seen.append(len(inputs[0]))
        return linear(graph, inputs)

    table = measure_costs(GRAPH, batches(4, 5, 2, 12), options_of(costs=counted))  # 4 and 5 have 3 samples at most
    assert sorted(seen) == [1, 3, 6]
    assert {samples: costs.by_node["_0"].forward for samples, costs in table.items()} == {3: 3, 6: 6, 1: 1}  # type: ignore[union-attr]
    assert {costs.model for costs in table.values()} == {"user"}  # type: ignore[union-attr]


def test_analytic_costs_are_those_of_the_model() -> None:
    (costs,) = measure_costs(GRAPH, batches(3), options_of()).values()
    assert isinstance(costs, MeasuredCosts)
    assert costs.model == "analytic"
    assert costs.by_node == analytic_costs(GRAPH, (torch.zeros(4, 4),), device="cpu")


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_micro_batch_adds_no_gradients(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = {node.name: NodeCost(1.0, 3.0, 0, 0, weight=2.0, adding=0.6) for node in compute_nodes(GRAPH)}
    monkeypatch.setattr(cost_table, "node_costs", lambda *_, **__: profiled)
    (costs,) = measure_costs(GRAPH, batches(count), options_of(cost="profile", dispatch="inline")).values()
    assert isinstance(costs, MeasuredCosts)
    average = costs.by_node["_0"]
    assert (average.forward, average.backward, average.weight) == (
        1.0,
        pytest.approx(3 - 0.6 / count),
        pytest.approx(2 - 0.6 / count),
    )


def test_seconds_of_the_user_replace_those_of_the_model() -> None:
    (costs,) = measure_costs(GRAPH, batches(3), options_of(costs={"0": 3.0})).values()
    assert isinstance(costs, MeasuredCosts)
    assert costs.model == "analytic and user"
    assert costs.by_node["_0"].forward + costs.by_node["_0"].backward == pytest.approx(3.0)
    assert costs.by_node["_1"].forward < 1e-3


def test_the_time_for_profiling_is_divided_among_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []

    def profiled(
        graph: fx.GraphModule, inputs: Sequence[Any], *, cost: str, device: Any, repeats: Any, work: Any
    ) -> Any:
        budgets.append(repeats.budget)
        assert cost == "profile"
        assert work is not None
        return linear(graph, inputs)

    monkeypatch.setattr(cost_table, "node_costs", profiled)
    monkeypatch.setattr(cost_table, "REPEATS", REPEATS)
    measure_costs(GRAPH, batches(2, 4, 6), options_of(cost="profile"))
    assert budgets == [pytest.approx(REPEATS.budget / 3)] * 3


def test_compile_measures_by_one_sweep_in_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the warm-up and the sweep with I and W apart: `measure_once` had no effect on `compile` once."""
    sweeps: list[bool] = []
    sweep = profile.sweep

    def counted(*args: Any, divided: bool = False) -> Any:
        sweeps.append(divided)
        return sweep(*args, divided=divided)

    monkeypatch.setattr(profile, "sweep", counted)
    pc.compile(layers(2), 2, example_args=(torch.zeros(4, 4),), n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    assert sweeps == [False, False, True]


def failing(graph: fx.GraphModule, inputs: Sequence[Any]) -> dict[str, NodeCost]:
    if len(inputs[0]) == 1:
        raise pc.CostError("one sample is too few")
    return linear(graph, inputs)


def test_a_size_that_cannot_be_measured_is_kept_as_an_error_beside_others() -> None:
    table = measure_costs(GRAPH, batches(4, 12), options_of(costs=failing))
    assert isinstance(table[3], MeasuredCosts)
    assert isinstance(table[1], pc.CostError)
    with pytest.raises(pc.CostError, match="one sample is too few"):
        measure_costs(GRAPH, batches(12), options_of(costs=failing))


def test_on_the_cpu_the_graph_is_measured_as_it_is() -> None:
    x = torch.zeros(4, 4)
    assert cost_table._moved(GRAPH, (x,), torch.device("cpu")) == (GRAPH, [x])


def test_elsewhere_a_copy_of_the_graph_is_measured_with_inputs_there() -> None:
    x = torch.zeros(4, 4)
    moved, (there,) = cost_table._moved(GRAPH, (x,), torch.device("meta"))
    assert moved is not GRAPH
    assert there.device.type == "meta"
    assert [node.name for node in compute_nodes(moved)] == [node.name for node in compute_nodes(GRAPH)]


def test_a_cost_error_in_several_micro_batches_names_a_smaller_number_to_try() -> None:
    cause = ValueError("too few")
    with pytest.raises(pc.CostError, match="norm failed") as caught, hint_at_small_microbatches(4, 1):
        raise pc.CostError("norm failed", where="net.py:3", why="because") from cause
    assert caught.value.hint == "n_microbatches=, fewer than 4, if a micro-batch of 1 is too small for the model"
    assert (caught.value.where, caught.value.why, caught.value.__cause__) == ("net.py:3", "because", cause)


def test_a_cost_error_of_the_whole_batch_and_other_errors_stay() -> None:
    error = pc.CostError("norm failed")
    with pytest.raises(pc.CostError) as caught, hint_at_small_microbatches(1, 4):
        raise error
    assert caught.value is error
    with pytest.raises(ZeroDivisionError), hint_at_small_microbatches(4, 1):
        raise ZeroDivisionError
