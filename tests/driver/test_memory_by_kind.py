"""Bytes by kind: they add up to what the plan holds, and a tied parameter counts once on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.driver.memory_by_kind import memory_by_kind, with_step_graph
from pipecompile.driver.programs import step_executable
from pipecompile.ir import HOST
from pipecompile.schedules import build_schedule
from tests.support.compilations import specialized


def normalised(width: int = 4) -> nn.Sequential:
    """Two layers with weights, and one with buffers between; the first is frozen."""
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    model[0].requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize(("optimizer", "copies"), [(None, 0), ("adam", 2)])
@pytest.mark.filterwarnings("ignore")
def test_the_kinds_add_up_to_the_state_of_the_plan(optimizer: str | None, copies: int) -> None:
    compiled = specialized(normalised(), batch_norm="each", optimizer=optimizer)
    kinds = memory_by_kind(compiled.graph, compiled.plan, (7.0, 9.0), copies)
    assert kinds.pop("activations") == [7.0, 9.0]
    held = [sum(row) for row in zip(*kinds.values(), strict=True)]
    assert held == [stage.state_bytes for stage in compiled.plan.stages]
    assert sum(kinds["parameters"]) == 4 * (20 + 8 + 20)
    assert sum(kinds["gradients"]) == 4 * (8 + 20)
    assert sum(kinds["optimizer"]) == copies * 4 * (8 + 20)
    assert sum(kinds["buffers"]) == 4 * 8 + 8


def test_two_stages_of_a_device_share_a_tied_weight() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    model[3].weight = model[0].weight
    two = specialized(model, n_stages=4, schedule="interleaved", devices=["cpu"] * 2)
    assert two.plan.placement == (0, 1, 0, 1)
    kinds = memory_by_kind(two.graph, two.plan, (), 1)
    assert kinds["parameters"] == kinds["optimizer"] == [2 * 64.0, 2 * 64.0]
    assert kinds["activations"] == [0.0, 0.0]
    one = specialized(model, n_stages=4, schedule="interleaved", devices=["cpu"])
    assert memory_by_kind(one.graph, one.plan, (), 0)["parameters"] == [3 * 64.0]


def test_a_device_has_the_parameters_of_all_copies_of_stages() -> None:
    """Those of the first copy of each stage alone were counted, a half of what the device has."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, affine=False))
    compiled = specialized(model, batch_norm="each")
    assert compiled.plan.placement == (0, 1)
    kinds = memory_by_kind(compiled.graph, compiled.plan, (), 2, build_schedule("chimera", 2, 4).directions)
    assert kinds["parameters"] == kinds["gradients"] == [4 * 48.0] * 2
    assert kinds["optimizer"] == [8 * 48.0] * 2
    assert kinds["buffers"] == [2 * 32.0 + 8] * 2


def test_a_graph_of_the_step_holds_inputs_and_gradients_once_more() -> None:
    compiled = specialized(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss_fn=torch.Tensor.mean)
    program = step_executable(compiled, 3, with_target=False).program
    kinds = with_step_graph(memory_by_kind(compiled.graph, compiled.plan, (), 0), program)
    (x,) = [route for route in program.routes if route.source == HOST and not route.gradient]
    assert kinds["graph"][0] == 3 * x.nbytes + 4 * 20
    assert kinds["graph"][1] >= 4 * 20
