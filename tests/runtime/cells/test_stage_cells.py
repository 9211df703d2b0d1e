"""Cells of stages by themselves: their order of inputs, the loss behind the last one, and what it may return."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import pipecompile as pc
from pipecompile.graph.stages import Stage
from pipecompile.ir import AUX, HOST, LOSS, TARGET, Route
from pipecompile.runtime.cells.stage_call import StageCode, loss_function
from pipecompile.runtime.cells.stage_cells import Cell, loss_cells, plain_cells

OUTPUTS: Any = SimpleNamespace(names=("y",), assemble=lambda value_named, size: (value_named("y"), size))


def stages() -> list[Stage]:
    first, last = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))), fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    for module in (first, last):
        module.forward = lambda *values: (-values[0],)  # type: ignore[method-assign]
    return [Stage(0, first, ("x",), ("h",), False, ()), Stage(1, last, ("h",), ("y",), False, ())]


def with_loss(loss_fn: Callable[..., Any] | None, *, has_aux: bool = False, outputs: Any = OUTPUTS) -> Cell:
    routes = [Route(TARGET, HOST, (1,)), Route("h", 0, (1,)), Route(LOSS, 1, (HOST,))]
    routes += [Route(AUX, 1, (HOST,))] if has_aux else []
    parts = stages()
    codes = [StageCode(stage.module.forward) for stage in parts]
    return loss_cells(parts, codes, routes, outputs, loss_fn)[-1]


def test_a_plain_cell_knows_its_parameters() -> None:
    first, last = plain_cells(parts := stages(), [StageCode(stage.module.forward) for stage in parts])
    assert len(first.parameters) == 2
    assert not last.parameters
    assert (first.inputs, first.outputs, first.is_sized) == (("x",), ("h",), False)


def test_the_last_cell_gives_the_loss_of_output_and_target() -> None:
    cell = with_loss(lambda output, target: (output[0] * target).sum() + output[1])
    assert (cell.inputs, cell.outputs, cell.is_sized) == ((TARGET, "h"), (LOSS,), True)
    (loss,) = cell.code.for_slot(None)(torch.tensor([10.0]), torch.tensor([3.0]), 5)
    assert loss.item() == -3 * 10 + 5


def test_a_loss_of_one_element_loses_its_dimensions() -> None:
    (loss,) = with_loss(lambda *_: torch.ones(1, 1)).code.for_slot(0)(torch.ones(1), torch.ones(1), 1)
    assert loss.shape == ()


def test_the_auxiliary_value_keeps_no_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    cell = with_loss(lambda *_: (weight.sum(), {"seen": weight * 2}), has_aux=True)
    loss, aux = cell.code.for_slot(None)(torch.ones(1), torch.ones(1), 1)
    assert cell.outputs == (LOSS, AUX)
    assert loss.requires_grad
    assert not aux["seen"].requires_grad


def test_without_a_loss_function_the_model_computes_the_loss() -> None:
    outputs: Any = SimpleNamespace(names=(), assemble=lambda value_named, size: {"loss": value_named("y").sum()})
    routes = [Route("h", 0, (1,)), Route(LOSS, 1, (HOST,))]
    parts = stages()
    cell = loss_cells(parts, [StageCode(stage.module.forward) for stage in parts], routes, outputs, None)[-1]
    (loss,) = cell.code.for_slot(None)(torch.tensor([3.0]), 1)
    assert loss.item() == -3


@pytest.mark.parametrize(
    ("loss", "has_aux", "text"),
    [
        (torch.ones(2), False, r"the loss is a tensor of shape \(2,\), not a scalar"),
        (1.0, False, "the loss is a float, not a scalar"),
        ((torch.ones(()), 1), False, r"has_aux=True\) if it returns"),
        (torch.ones(()), True, "loss_fn returned a Tensor"),
    ],
)
def test_another_loss_is_refused(loss: Any, has_aux: bool, text: str) -> None:
    cell = with_loss(lambda *_: loss, has_aux=has_aux)
    with pytest.raises(pc.InputError, match=text):
        cell.code.for_slot(None)(torch.ones(1), torch.ones(1), 1)


def test_a_loss_per_sample_that_the_model_computes_itself_is_refused_with_a_loss_function_to_paste() -> None:
    with pytest.raises(pc.InputError, match=r"shape \(2,\).*\n.*loss_fn=lambda output: output\.loss\.mean\(\)"):
        loss_function(None, has_aux=False)({"loss": torch.ones(2)})


class Inputs(nn.Module):
    """An input for each way in which a stage may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.twice, self.passed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return self.own(a) + self.twice(b) + b + self.passed(c) + d


def test_only_inputs_of_one_layer_that_writes_new_memory_are_unshared() -> None:
    pipe = pc.compile(Inputs(), 1, example_args=(torch.randn(2, 4),) * 4, cost="analytic", devices=["cpu"])
    (cell,) = plain_cells(pipe.stages, [StageCode.of(stage.module) for stage in pipe.stages])
    assert cell.unshared == {pipe.stages[0].inputs[0]}
