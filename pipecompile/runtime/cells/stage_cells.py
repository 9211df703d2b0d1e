"""Cells of a program: what each stage computes, the last stage with its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, Protocol

from torch import nn

from pipecompile.graph.stages import Stage
from pipecompile.ir import AUX, LOSS, Route
from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.runtime.cells.loss_arguments import loss_places
from pipecompile.runtime.cells.loss_draws import LossDraws
from pipecompile.runtime.cells.loss_gradients import LossGradients
from pipecompile.runtime.cells.loss_writes import LossWrites
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.cells.sliced import SliceState
from pipecompile.runtime.cells.stage_call import LossCode, StageCode, with_loss
from pipecompile.runtime.results import Outputs
from pipecompile.tracing.reachable_code import is_foreign
from pipecompile.tracing.state.function_state import reads_objects

__all__ = ["Cell", "CellCode", "loss_cells", "plain_cells", "unshared_places"]


class CellCode(Protocol):
    """Code of a cell: a stage as it is, a stage followed by the loss, or a stage captured as CUDA graphs."""

    def refresh(self) -> None:
        """Take note of hooks and weights that changed. Called before each run of the program."""

    def for_slot(self, slot: int | None, *, stays: bool = True) -> Function:
        """Return the function for micro-batches whose state is kept in `slot`; None if no state is kept.

        `stays`: it is there until the backward, and not copied to the host meanwhile.
        """


@dataclass(frozen=True, slots=True)
class Cell:
    """The computation of one stage in one program.

    `code` maps `inputs`, and the number of samples if `is_sized`, to the tuple of `outputs`. `parameters` are the ids of the
    stage's parameters. `unshared` are inputs whose gradients are always in memory of their own. `module` is that of the stage.
    `slices` is what its attentions and positions read while it runs on a slice; None if micro-batches are whole. `reads_objects`:
    it has a loss that reads objects beside its arguments.
    """

    code: CellCode
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_sized: bool
    effects: SideEffects
    parameters: frozenset[int]
    unshared: frozenset[str] = frozenset()
    module: nn.Module = field(default_factory=nn.Module)
    slices: SliceState | None = None
    reads_objects: bool = False

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """The cell, as those of a stage with several recordings."""
        return (self,)

    @property
    def all_effects(self) -> tuple[SideEffects, ...]:
        """The side effects of the stage, as those of a stage with several recordings."""
        return (self.effects,)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module of the stage, as those of a stage with several recordings."""
        return (self.module,)


def unshared_places(cell: Any) -> tuple[int, ...]:
    """Return the places of the unshared inputs of a cell, or of one with several recordings."""
    return tuple(place for place, name in enumerate(cell.inputs) if name in cell.unshared)


def plain_cells(stages: Sequence[Stage], codes: Sequence[StageCode]) -> list[Cell]:
    """Return the cells of a program without loss."""
    return [
        Cell(
            code,
            stage.inputs,
            stage.outputs,
            stage.sized,
            SideEffects.of(stage),
            _parameters(stage),
            _unshared(stage),
            stage.module,
        )
        for stage, code in zip(stages, codes, strict=True)
    ]


def _parameters(stage: Stage) -> frozenset[int]:
    return frozenset(map(id, stage.module.parameters()))


_OWN_GRADIENT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.ReLU)
"""Layers whose kernel writes the gradient of the input into new memory. Others may pass on the memory that they get."""


def _unshared(stage: Stage) -> frozenset[str]:
    """Return the inputs that one layer takes, and nothing else, if it makes new memory for their gradient."""
    found = set()
    for node in stage.module.graph.find_nodes(op="placeholder"):
        users = list(node.users)
        if len(users) == 1 and users[0].op == "call_module" and users[0].args == (node,) and not users[0].kwargs:
            layer = stage.module.get_submodule(str(users[0].target))
            found |= {node.name} if type(layer) in _OWN_GRADIENT else set()
    return frozenset(found)


def loss_cells(
    stages: Sequence[Stage],
    codes: Sequence[StageCode],
    routes: Sequence[Route],
    outputs: Outputs,
    loss_fn: Callable[..., Any] | None,
) -> list[Cell]:
    """Return the cells of a training program: the last stage assembles the model's output and computes the loss."""
    inputs = tuple(route.value for route in routes if len(stages) - 1 in route.consumers)
    *others, last = plain_cells(stages, codes)
    has_aux = any(route.value == AUX for route in routes)
    holders = _holder(loss_fn)
    draws, writes = (LossDraws(holders[0]), LossWrites(holders[0])) if holders else (None, None)
    gradients, end = LossGradients.of(stages, inputs, loss_fn), (stages[-1], codes[-1].run)
    function = with_loss(
        *end, inputs, outputs, loss_fn, has_aux=has_aux, draws=draws, writes=writes, gradients=gradients
    )
    loss_inputs = loss_places(stages[-1], inputs, outputs.names) if holders else ()
    cell = replace(
        last,
        code=LossCode(codes[-1], function),
        inputs=inputs,
        outputs=(LOSS, AUX) if has_aux else (LOSS,),
        is_sized=True,
        effects=replace(
            _effects_before_loss(last, inputs, holders), loss=draws, loss_writes=writes, loss_inputs=loss_inputs
        ),
        unshared=last.unshared - set(outputs.names),
        reads_objects=reads_objects(loss_fn),
    )
    return [*others, cell]


def _effects_before_loss(last: Cell, inputs: tuple[str, ...], holders: tuple[Any, ...]) -> SideEffects:
    """Return the side effects of the last stage, as a cell with these inputs has them, and a loss that `holders` has."""
    written = tuple(inputs.index(last.inputs[place]) for place in last.effects.written_inputs)
    return replace(last.effects, written_inputs=written, holders=(*last.effects.holders, *holders))


def _holder(loss_fn: Callable[..., Any] | None) -> tuple[Any, ...]:
    """Return the loss function, if it may have state: functions of torch have none."""
    is_stateless = loss_fn is None or (isinstance(loss_fn, FunctionType) and is_foreign(loss_fn))
    return () if is_stateless else (loss_fn,)
