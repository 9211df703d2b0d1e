"""The state that a recording of a model read, for tests of guards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipecompile.tracing.guards.read_state import ReadState
from pipecompile.tracing.guards.state_guards import StateGuards
from pipecompile.tracing.guards.state_reader import StateReader
from pipecompile.tracing.recording import trace

__all__ = ["Calls", "guards_of", "state_of"]


class Calls(nn.Module):
    """A model that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.scale = nn.Linear(2, 2), 0, 1.0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * self.scale


def state_of(model: nn.Module, *args: Any) -> ReadState:
    reads = trace(model, *args).facts.reads
    assert reads is not None
    return StateReader(model, reads.notes, reads.written).read()


def guards_of(model: nn.Module, *args: Any) -> StateGuards:
    reads = trace(model, *args).facts.reads
    assert reads is not None
    return reads.guards()
