"""The tables of one recording: put on the model, held while nothing is written, and taken off."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.driver.left_tables import LeftTables, replaced_spots, spot_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.length = nn.Linear(4, 4), None, 0
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.length != x.shape[1]:
            with torch.no_grad():
                self.table, self.length = torch.arange(x.shape[1])[:, None] * self.scale, x.shape[1]
        return self.layer(x) + self.table


def left(model: nn.Module) -> LeftTables:
    tables = LeftTables(pc.trace(model, torch.randn(2, 3, 4)))
    assert tables.leave(set())
    return tables


def test_a_table_is_left_with_its_note() -> None:
    model = Net()
    tables = left(model)
    assert model.length == 3
    assert torch.equal(model.table, torch.arange(3.0)[:, None].expand(3, 4))
    assert tables.spots == {(id(vars(model)), "table"), (id(vars(model)), "length")}
    assert tables.are_attributes


def test_tables_hold_while_neither_they_nor_their_sources_are_written() -> None:
    model = Net()
    tables = left(model)
    assert tables.hold()
    model.scale.add_(1)
    assert not tables.hold()
    tables.leave(set())
    model = Net()
    tables = left(model)
    model.table = model.table.clone()
    assert not tables.hold()
    tables.forget()
    assert tables.hold()


def test_tables_at_skipped_spots_are_not_left() -> None:
    model = Net()
    tables = LeftTables(graph := pc.trace(model, torch.randn(2, 3, 4)))
    assert not tables.leave({spot_of(graph.facts.tables[0].place)})
    assert tables.is_tried
    assert model.table is None


def test_tables_that_are_replaced_by_no_larger_ones_are_taken_off() -> None:
    model = Net()
    tables = left(model)
    assert not replaced_spots(pc.trace(model, torch.randn(2, 5, 4)), tables.spots)
    replaced = replaced_spots(pc.trace(model, torch.randn(2, 2, 4)), tables.spots)
    assert replaced == {(id(vars(model)), "table")}
    tables.take_off(replaced)
    assert (model.table, model.length) == (None, 0)


class Apart(nn.Module):
    """Has a table that grows, and beside it one that every other length replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table, self.mask = nn.Linear(4, 4), None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if self.mask is None or len(self.mask) != length:
            self.mask = torch.ones(length).cumsum(0)
        if self.table is None or len(self.table) < length:
            self.table = torch.arange(length) / length
        return self.layer(x) * self.table[:length, None] + self.mask[:, None]


def test_a_table_that_grows_is_left_beside_one_that_is_replaced() -> None:
    """Neither was left, so that a shorter sequence read a table of its own."""
    model, pipe = Apart(), pc.compile(reference := Apart(), 1, devices=["cpu"], n_microbatches=1, cost="analytic")
    model.load_state_dict(reference.state_dict())
    for length in (6, 4, 6, 8, 4):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(pipe(x), model(x))
        assert torch.equal(reference.table, model.table)
