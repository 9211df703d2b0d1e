"""Cells of several recordings behind the same inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch

from pipecompile.ir import HOST, Route
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import PortedCode, VariantCell, chosen_run, with_ports
from pipecompile.runtime.registers import Frame

ROUTES = (Route("x", HOST, (0,)), Route("h", 0, (1,)), Route("k", 0, (1,)), Route("y", 1, (HOST,)))


class Code:
    """A cell's function that notes when it is refreshed."""

    def __init__(self) -> None:
        self.refreshed = 0

    def refresh(self) -> None:
        self.refreshed += 1

    def for_slot(self, slot: int | None, **_: bool) -> Any:
        return lambda *values: (sum(values) + (slot or 0),)


def cell(inputs: tuple[str, ...], outputs: tuple[str, ...], written: tuple[int, ...] = ()) -> Cell:
    return Cell(Code(), inputs, outputs, False, SideEffects(written_inputs=written), frozenset())  # type: ignore[arg-type]


def test_a_value_that_a_recording_lacks_is_none() -> None:
    names = {route.value: route.value for route in ROUTES}
    ported = with_ports(cell(("k",), ("y",), (0,)), 1, ROUTES, names)
    assert (ported.inputs, ported.outputs, ported.effects.written_inputs) == (("h", "k"), ("y",), (1,))
    assert ported.code.for_slot(3)(torch.tensor(100), torch.tensor(1)) == (4,)
    producer = with_ports(cell(("x",), ("own",)), 0, ROUTES, {"x": "x", "own": "k"})
    assert producer.code.for_slot(None)(2) == (None, 2)
    assert producer.code.for_slot(None)(2, 5) == (None, 7)  # the number of samples comes last
    assert isinstance(producer.code, PortedCode)


def test_equal_ports_leave_the_code_alone() -> None:
    one = cell(("h", "k"), ("y",))
    assert with_ports(one, 1, ROUTES, {name: name for name in "hky"}).code is one.code


def test_the_recording_of_a_micro_batch_chooses_its_code() -> None:
    made: list[int] = []

    def make(number: int) -> Any:
        made.append(number)
        return lambda frame: frame.registers.append(number)

    run, frame = chosen_run(1, make), Frame([], [], recordings=(7, 8))
    run(frame)
    run(frame)
    frame.recordings = (8, 7)
    run(frame)
    assert (frame.registers, made) == ([8, 8, 7], [8, 7])


def test_only_selected_recordings_are_refreshed() -> None:
    stage = VariantCell({1: cell(("h",), ("y",)), 2: cell(("h",), ("y",))}, {})
    stage.selected = frozenset({2})
    stage.code.refresh()
    assert [one.code.refreshed for one in stage.variants.values()] == [0, 1]  # type: ignore[attr-defined]
