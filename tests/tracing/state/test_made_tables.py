"""What a recording notes of tables that every run makes anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.made_tables import MadeTable, NodeName


class Net(nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.layer, self.note, self.table, self.cache, self.marked = nn.Linear(4, 4), note, None, {}, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table, self.marked = (torch.arange(4.0), 4), self.note
        self.cache["last"] = torch.ones(4)
        return self.layer(x) * self.table[0] + self.cache["last"]


def tables_of(note: Any) -> tuple[MadeTable, ...]:
    return pc.trace(Net(note), torch.randn(2, 4)).facts.tables


def test_a_table_has_the_node_and_the_line_that_compute_it() -> None:
    graph = pc.trace(Net(True), torch.randn(2, 4))
    table, note = graph.facts.tables
    assert (table.name, table.shapes, note.name, note.value, note.shapes) == ("table", ("(4,)",), "marked", True, ())
    assert isinstance(table.value[0], NodeName)
    assert table.value[0].name in {node.name for node in graph.graph.nodes}
    assert table.value[1] == 4
    assert "in Net.forward" in table.source


def test_tables_that_each_call_makes_are_not_noted() -> None:
    assert all(table.name != "cache.last" for table in tables_of(True))


def test_a_module_with_a_note_that_is_an_object_has_no_tables() -> None:
    assert not tables_of(nn.ReLU)
