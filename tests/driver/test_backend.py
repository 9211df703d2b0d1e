"""The backend of one process: it plans alone, and every device is its own."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.rank_backend import RankBackend
from pipecompile.driver.backend import Backend
from pipecompile.graph.stages import routes, split
from pipecompile.parameters.placement import Homes
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.planning.planner import Planned
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from pipecompile.runtime.executable import Executable
from tests.support.compilations import options_of

PLAN = pc.Plan("f", 2, ("cpu",) * 2, (0, 1), {"a": 0, "b": 1}, (), (), 1.0, 1.0, "optimal", "dp", "analytic")


def test_one_process_plans_and_shares_nothing() -> None:
    backend, planned, norms = Backend(), Planned(PLAN, None, 2), DeferredNorms()
    assert backend.is_planner
    assert backend.share_plan(planned) is planned
    assert backend.deferred_norms(norms) is norms
    assert backend.gather_text("topic", "text") == ["text"]
    assert backend.united(["a", "b"]) == {"a", "b"}
    assert backend.executable(Mirrors()) is Executable
    with backend.without_collectives(nn.Identity(), options_of()) as entered:
        assert entered is None


def test_the_only_process_must_have_a_plan() -> None:
    with pytest.raises(AssertionError):
        Backend().share_plan(None)


def test_a_rank_takes_every_decision_of_its_own_with_the_same_parameters() -> None:
    decisions = {name: method for name, method in vars(Backend).items() if inspect.isfunction(method)}
    decisions.pop("memories")
    assert len(decisions) == 16
    for name, method in decisions.items():
        own = inspect.signature(vars(RankBackend)[name])
        assert list(own.parameters) == list(inspect.signature(method).parameters), name


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.zeros(3, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Apart(Backend):
    """A backend that gives every pipeline device a memory of its own, although all are one CPU."""

    def memories(self, devices: Sequence[torch.device], placement: Sequence[int]) -> Sequence[Hashable]:
        return placement


def test_parameters_get_the_home_of_their_stage_and_unused_tensors_memory() -> None:
    model, homes, options = Unused(), Homes(), options_of()
    graph = pc.trace(model, torch.randn(2, 4))
    stages = split(graph, routes(graph, PLAN.stage_of), PLAN.stage_of, list(options.devices))
    assert isinstance(Apart().place(model, graph, stages, PLAN, options, homes), Mirrors)
    assert (homes.find(model.a.weight), homes.find(model.b.bias), homes.find(model.unused)) == (0, 1, None)
    assert model.unused.device == torch.device("cpu")


def test_stages_on_one_device_share_memory() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert Backend().memories([cpu, meta, cpu], (0, 1, 2)) == [cpu, meta, cpu]
