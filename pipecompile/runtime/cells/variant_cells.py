"""Cells of a program whose micro-batches come from several recordings: in each run, the cell of the micro-batch's recording.

micro-batch 0, (3, 17)   1F0 ──► cell of recording 1        inputs and outputs of a stage have the names of the union;
micro-batch 1, (2, 40)   1F1 ──► cell of recording 2        a value that a recording does not have is None
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from pipecompile.ir import Route
from pipecompile.runtime.cells.forward_backward import Function
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.cells.stage_cells import Cell, CellCode
from pipecompile.runtime.registers import Frame, Run

__all__ = ["PortedCode", "VariantCell", "chosen_run", "with_ports"]


class VariantCell:
    """A stage: `variants` has its cell for each recording, by number, all with the same `inputs` and `outputs`.

    `graphs` are the recordings. `parameters` are the ids of the stage's parameters, the same for all variants; `unshared` are the
    inputs that are unshared in all of them.
    """

    def __init__(self, variants: dict[int, Cell], graphs: dict[int, fx.GraphModule]) -> None:
        first = next(iter(variants.values()))
        self.variants, self.graphs = variants, graphs
        self.inputs, self.outputs, self.parameters = first.inputs, first.outputs, first.parameters
        self.unshared = frozenset.intersection(*(cell.unshared for cell in variants.values()))
        self.selected: frozenset[int] = frozenset(variants)

    @property
    def code(self) -> VariantCell:
        """The code that is refreshed before a run: that of all selected recordings."""
        return self

    @property
    def all_cells(self) -> tuple[Cell, ...]:
        """The cells of the recordings."""
        return tuple(self.variants.values())

    @property
    def all_effects(self) -> tuple[SideEffects, ...]:
        """The side effects of the stage in each recording."""
        return tuple(cell.effects for cell in self.variants.values())

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module of the stage in each recording."""
        return tuple(cell.module for cell in self.variants.values())

    def refresh(self) -> None:
        """Refresh the code of the selected recordings."""
        for number in self.selected:
            self.variants[number].code.refresh()


def chosen_run(microbatch: int, make: Callable[[int], Run]) -> Run:
    """Return a function that runs what `make` returns for the number of the micro-batch's recording, made at its first use."""
    runs: dict[int, Run] = {}

    def run(frame: Frame) -> None:
        number = frame.recordings[microbatch]
        function = runs.get(number)
        if function is None:
            function = runs[number] = make(number)
        function(frame)

    return run


def with_ports(cell: Cell, stage: int, routes: Sequence[Route], names: Mapping[str, str]) -> Cell:
    """Return the cell of a stage with the inputs and outputs of `routes`; `names` maps its own values to theirs."""
    inputs = tuple(route.value for route in routes if stage in route.consumers)
    outputs = tuple(route.value for route in routes if route.source == stage)
    own_inputs, own_outputs = ([names[name] for name in side] for side in (cell.inputs, cell.outputs))
    if (tuple(own_inputs), tuple(own_outputs)) == (inputs, outputs):
        return replace(cell, inputs=inputs, outputs=outputs)
    takes = tuple(inputs.index(name) for name in own_inputs)
    place = {name: index for index, name in enumerate(own_outputs)}
    code = PortedCode(cell.code, len(inputs), takes, tuple(place.get(name) for name in outputs))
    moved = [tuple(takes[index] for index in own) for own in (cell.effects.written_inputs, cell.effects.loss_inputs)]
    effects = replace(cell.effects, written_inputs=moved[0], loss_inputs=moved[1])
    return replace(cell, code=code, inputs=inputs, outputs=outputs, effects=effects)


@dataclass(frozen=True, slots=True)
class PortedCode:
    """Code of a cell with `width` inputs, of which `takes` are the places of its own; `gives` are the places of its outputs."""

    code: CellCode
    width: int
    takes: tuple[int, ...]
    gives: tuple[int | None, ...]

    def refresh(self) -> None:
        """Refresh the code."""
        self.code.refresh()

    def for_slot(self, slot: int | None, *, stays: bool = True) -> Function:
        """Return the function of the code for `slot`, with these inputs and outputs."""
        function = self.code.for_slot(slot, stays=stays)

        def ported(*values: Any) -> Sequence[Any]:
            results = function(*[values[place] for place in self.takes], *values[self.width :])
            return tuple(None if place is None else results[place] for place in self.gives)

        return ported
