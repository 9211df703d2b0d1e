from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace

from pipecompile.costs.node_cost import CostError
from pipecompile.costs.node_run import NodeRun
from pipecompile.costs.sweep import Sums, sweep


def clock(work: Callable[[], None]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


class Residual(nn.Module):
    """A value with three uses, a weight that is read as an attribute, a node that writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.frozen = (
            nn.Linear(64, 64),
            nn.Linear(64, 64),
            nn.Linear(64, 64).requires_grad_(False),
        )
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        y = F.relu_(torch.addmm(x.new_zeros(64), x, self.weight))
        return x + self.outer(self.frozen(y)) * x


@pytest.mark.parametrize("divided", [False, True])
def test_gradients_flow_through_the_nodes_as_in_eager_and_are_added_up(divided: bool) -> None:
    model, x = Residual(), torch.randn(512, 64)
    sums = Sums(model.parameters())
    for _ in range(2):
        sweep(symbolic_trace(model), [x], clock, sums, divided=divided)
        model(x).sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sums.of(model.frozen.weight) is None
    for parameter in trained:
        found = sums.of(parameter)
        assert found is not None
        torch.testing.assert_close(found.value, parameter.grad)


def test_only_products_that_lead_inward_leave_something_to_w() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 2))
    times = sweep(symbolic_trace(model), [torch.randn(512, 64)], clock, Sums(model.parameters()), divided=True)
    assert {name for name, seconds in times.items() if seconds.weight} == {
        "_2"
    }  # the first has no input, the last no work
    undivided = sweep(symbolic_trace(model), [torch.randn(512, 64)], clock, Sums(()))
    assert all(seconds.weight == 0 for seconds in undivided.values())


@pytest.mark.parametrize("divided", [False, True])
def test_adding_the_gradients_of_parameters_has_a_time_of_its_own(divided: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64).requires_grad_(False))
    times = sweep(symbolic_trace(model), [torch.randn(512, 64)], clock, Sums(model.parameters()), divided=divided)
    assert {name for name, seconds in times.items() if seconds.adding} == {"_0"}


def test_the_search_for_the_weights_of_w_counts_for_i(monkeypatch: pytest.MonkeyPatch) -> None:
    search = NodeRun.weight_grad_nodes

    def slow(run: NodeRun, *, recorded: bool) -> Any:
        sleep(1e-3)
        return search(run, recorded=recorded)

    def no_time(work: Callable[[], None]) -> float:
        work()
        return 0.0

    monkeypatch.setattr(NodeRun, "weight_grad_nodes", slow)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for divided, searched in (False, set()), (True, {"_2"}):
        times = sweep(symbolic_trace(model), [torch.randn(512, 64)], no_time, Sums(model.parameters()), divided=divided)
        assert {name for name, seconds in times.items() if seconds.backward >= 1e-3} == searched


def test_without_gradients_there_is_no_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with torch.no_grad():
        times = sweep(symbolic_trace(model), [torch.randn(4, 8)], clock, Sums(()))
    assert all(seconds.backward == seconds.weight == seconds.adding == 0 for seconds in times.values())


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: object, _gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("no way back")


def refuse(x: Tensor) -> Tensor:
    result: Tensor = Refusing.apply(x)
    return result


torch.fx.wrap("refuse")


def test_a_backward_that_fails_names_its_node() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return refuse(self.linear(x))

    model = Model()
    with pytest.raises(CostError, match=r"node refuse .*no way back"):
        sweep(symbolic_trace(model), [torch.randn(2, 4)], clock, Sums(model.parameters()))
