"""The phases of a compilation, with a backend that counts its decisions and may be no planner."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver import backend as one_process
from pipecompile.driver import phases
from pipecompile.driver.compile_context import Decision
from pipecompile.driver.phases import check_division, specialize
from pipecompile.graph.colocation import note_ties
from pipecompile.parameters.placement import Homes, move_model
from pipecompile.planning.planner import Planned
from pipecompile.tracing.guards.state_guards import ReadChange
from pipecompile.tracing.traced_graph import TracedGraph
from tests.support.compilations import context_of, layers, mini_batch, options_of, request_of

X = torch.randn(6, 4)


class Backend(one_process.Backend):
    """A backend that records its decisions. With a plan, another process is the planner."""

    def __init__(self, planned: Planned | None = None) -> None:
        self.planned, self.calls = planned, list[Any]()

    @property
    def is_planner(self) -> bool:
        return self.planned is None

    def agree_on_graph(
        self, graph: TracedGraph, n_stages: int, counts: Sequence[int], changes: Sequence[ReadChange] = ()
    ) -> None:
        self.calls.append((n_stages, counts))

    def share_plan(self, planned: Planned | None) -> Planned:
        self.calls.append(planned)
        return self.planned or super().share_plan(planned)


def compiled(model: nn.Module, *counts: int, decision: Decision | None = None, backend: Backend | None = None, **keywords: Any) -> Any:  # fmt: skip
    options = options_of(model, **keywords)
    request = request_of(model, *(mini_batch(model, count, X) for count in counts or (2,)))
    return specialize(request, options, decision or Decision(), context_of(model, options, backend))


def test_all_phases_run_in_order_and_later_calls_keep_the_decision() -> None:
    model, backend = layers(4), Backend()
    first, decision = compiled(model, backend=backend)
    assert list(first.log.lines) == ["record", "prepare", "cost", "partition", "split", "place"]
    assert first.log.lines["record"] == "4 operations"
    assert first.log.lines["cost"] == "1 micro-batch size"
    assert first.log.lines["split"] == "2 stages, 3 routes"
    assert backend.calls[0] == (2, (2,))
    assert backend.calls[1].plan is first.plan is decision.plan
    assert [stage.nodes for stage in first.stages] == [("_0", "_1"), ("_2", "_3")]
    assert (first.inputs, first.stage_devices) == (("input_1",), (torch.device("cpu"),) * 2)
    later, same = compiled(model.eval(), decision=decision, backend=backend)
    assert list(later.log.lines) == ["record", "prepare", "split", "place"]
    assert later.plan is first.plan
    assert (same, backend.calls[2:]) == (decision, [(2, (2,))])  # later recordings are compared as well


def test_a_process_that_does_not_plan_takes_the_shared_plan_and_measures_nothing() -> None:
    planner, _ = compiled(layers(4))
    backend = Backend(Planned(planner.plan, None, 3))
    other, decision = compiled(layers(4), backend=backend)
    assert backend.calls == [(2, (2,)), None]
    assert other.log.lines["cost"] == "0 micro-batch sizes"
    assert decision.plan is other.plan is planner.plan


def test_what_is_left_open_is_chosen_with_the_cut() -> None:
    chosen, decision = compiled(layers(4), 2, 1, 3, n_microbatches="auto", schedule="1f1b")
    assert chosen.plan.considered is not None
    assert {row.n_microbatches for row in chosen.plan.considered.rows} == {1, 2, 3}
    assert chosen.options.n_microbatches == chosen.plan.considered.best.n_microbatches
    assert decision.plan is chosen.plan
    assert chosen.log.lines["cost"] == "3 micro-batch sizes"


def test_a_recording_that_fails_in_micro_batches_names_the_inputs_in_doubt() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, texts: list[torch.Tensor]) -> torch.Tensor:
            return x @ weight + torch.stack(texts)

    model, options = Square(), options_of(n_stages=1)
    batch = mini_batch(model, 2, torch.zeros(4, 4), torch.zeros(4, 4), [torch.zeros(1)] * 4)
    with pytest.raises(pc.TraceError) as caught:
        specialize(request_of(model, batch), options, Decision(), context_of(model, options))
    assert re.search(r'batch_dims=\{"weight": None\}, if all samples share it', caught.value.hint)
    assert re.search(r'batch_dims=\{"texts": list\}, if there is an entry per sample', caught.value.hint)


def test_too_many_stages_and_unknown_names_are_refused_before_costs_are_measured() -> None:
    def costs(graph: Any, inputs: Any) -> Any:
        raise AssertionError("measured")

    with pytest.raises(pc.PartitionError, match="cannot be cut into 3 stages"):
        compiled(layers(2), n_stages=3, costs=costs)


def test_a_plan_for_another_number_of_devices_is_refused() -> None:
    planner, _ = compiled(layers(4))
    v = compiled(layers(4), n_stages=2, devices=["cpu"], schedule="interleaved")
    assert v[0].stage_devices == (torch.device("cpu"),) * 2
    with pytest.raises(pc.PlanError, match="the plan is for 2 devices, compile has 1"):
        compiled(layers(4), devices=["cpu"], schedule="interleaved", decision=Decision(planner.plan))


def test_division_is_checked_for_several_micro_batches_of_a_decided_number() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with pytest.warns(pc.RecordingWarning, match="a BatchNorm layer updates its running statistics"):
        compiled(model)
    graph, options = note_ties(pc.trace(model, X)), options_of(batch_norm="each")
    check_division(graph, options, context_of(model, options))  # no warning: the user has decided


def test_recurrent_layers_that_take_the_batch_for_time_are_refused() -> None:
    model, options = nn.Sequential(nn.GRU(4, 4)), options_of()
    graph = pc.trace(model, torch.zeros(3, 2, 4))
    with pytest.raises(pc.InputError, match="takes the batch for time"):
        check_division(graph, options, context_of(model, options))


def test_deferred_norms_are_those_of_the_backend() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    class Marked(Backend):
        def deferred_norms(self, norms: Any) -> Any:
            self.calls.append(norms)
            return norms

    for batch_norm, count in (("deferred", 1), ("each", 0)):
        backend = Marked()
        compiled(model, backend=backend, batch_norm=batch_norm)
        assert len(backend.calls[-1].norms) == count


def test_a_micro_batch_too_small_for_the_model_is_said_to_be() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(pc.CostError, match=r"n_microbatches=, fewer than 6, if a micro-batch of 1 is too small"):
        compiled(model, 6, batch_norm="each")
    assert compiled(model, 3, batch_norm="each")[0].log.lines["cost"] == "1 micro-batch size"


class Crowded:
    """A device that is full after so many tensors."""

    def __init__(self, room: int) -> None:
        self.room = room

    def to(self, tensor: torch.Tensor, device: object, **_: object) -> torch.Tensor:
        if str(device) == "cuda:0":
            if self.room == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.room -= 1
            return torch.full_like(tensor, 7.0)
        return torch.zeros_like(tensor)


def test_a_model_that_does_not_fit_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, half of it stayed on the GPU on which it was to be measured."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    crowded = Crowded(3)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **_: crowded.to(self, device))
    with pytest.raises(torch.OutOfMemoryError):
        move_model(model, torch.device("cuda:0"))
    *moved, last = model.parameters()
    assert not any(bool(p.any()) for p in moved)
    assert bool(last.any()), "the one that had no room was not moved"
    crowded.room = 4
    move_back = move_model(model, torch.device("cuda:0"))
    assert all(bool((p == 7.0).all()) for p in model.parameters())
    move_back()
    assert not any(bool(p.any()) for p in model.parameters())


def test_stages_that_do_not_fit_stay_where_they_are_and_the_error_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, an error of torch without a stage, and half of the model on the device."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(4, 3)
    places = [p.data_ptr() for p in model.parameters()]
    move, room = Homes.move, [3]

    def crowded(homes: Homes, tensor: torch.Tensor, device: torch.device, **_: object) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        move(homes, tensor, device)

    monkeypatch.setattr(Homes, "move", crowded)
    with pytest.raises(
        pc.InfeasibleError, match=r"stage 1 do not fit on cpu.*predicted peak of a step there is \d"
    ) as caught:
        pc.compile(model, 2, example_args=(x,), cost="analytic")
    assert "memory_limit=" in str(caught.value)
    assert [p.data_ptr() for p in model.parameters()] == places
    room[0] = 99
    assert pc.compile(model, 2, example_args=(x,), cost="analytic")(x).shape == (4, 3)


def test_a_failed_placement_moves_back_what_it_had_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, homes, crowded = [torch.ones(2) for _ in range(3)], Homes(), Crowded(2)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **_: crowded.to(self, device))
    homes.assign(tensors[0], "kept")
    gpu = torch.device("cuda:0")
    homes.move(tensors[0], gpu)

    def place() -> None:
        with homes.all_or_none():
            for tensor in tensors[1:]:
                homes.assign(tensor, "gpu")
                homes.move(tensor, gpu)

    with pytest.raises(torch.OutOfMemoryError):
        place()
    assert [homes.find(one) for one in tensors] == ["kept", None, None]
    assert [float(one[0]) for one in tensors] == [7.0, 0.0, 1.0], "before, there again, never moved"


@pytest.mark.parametrize("place", ["moving", "measuring"])
def test_a_model_larger_than_its_device_is_compiled_with_estimates(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved_back: list[bool] = []

    def full(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if place == "moving":
        monkeypatch.setattr(phases, "move_model", full)
    else:
        monkeypatch.setattr(phases, "move_model", lambda *_: lambda: moved_back.append(True))
        monkeypatch.setattr("pipecompile.costs.model_choice.profiled_costs", fails_for_memory)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(4, 3)
    with pytest.warns(pc.RecordingWarning, match="does not fit on cpu, where its operations would be measured"):
        pipe = pc.compile(model, 2, example_args=(x,))
    assert pipe.plan.n_stages == 2
    assert moved_back == [True] * (place == "measuring")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    with pytest.raises(pc.CostError, match="where its operations are measured"):
        pc.compile(model, 2, example_args=(x,), cost="profile")


def fails_for_memory(*_: object, **__: object) -> None:
    raise pc.CostError("node x failed") from torch.OutOfMemoryError("CUDA out of memory")
