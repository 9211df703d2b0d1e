"""A program of two stages whose cells are plain functions of tensors: nothing is traced or partitioned.

x ──► stage 0: h = x * w0 ──► stage 1: loss = mean(h * w1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from pipecompile.ir import HOST, LOSS, Program, Route
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.passes import lower
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.executable import Executable, ProgramBinding
from pipecompile.schedules import build_schedule

__all__ = ["CPU", "PlainCode", "arrivals", "cells", "executable", "program", "weights"]

CPU = torch.device("cpu")
ROUTES = (Route("x", HOST, (0,)), Route("h", 0, (1,)), Route(LOSS, 1, (HOST,)))


@dataclass(slots=True)
class PlainCode:
    """Code of a cell: a function, and the number of refreshes so far."""

    function: Callable[..., Sequence[Any]]
    refreshes: int = 0

    def refresh(self) -> None:
        self.refreshes += 1

    def for_slot(self, _slot: int | None, **_: bool) -> Callable[..., Sequence[Any]]:
        return self.function


def program(schedule: str = "1f1b", n_microbatches: int = 2) -> Program:
    return lower(build_schedule(schedule, 2, n_microbatches), ROUTES)


def weights() -> list[torch.Tensor]:
    return [torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)]


def cells(first: torch.Tensor, last: torch.Tensor) -> list[Cell]:
    parts = (("x", "h", lambda x: (x * first,), first), ("h", LOSS, lambda h: ((h * last).mean(),), last))
    return [
        Cell(PlainCode(function), (source,), (made,), False, SideEffects(), frozenset({id(weight)}))
        for source, made, function, weight in parts
    ]


def executable(first: torch.Tensor, last: torch.Tensor, schedule: str = "1f1b", count: int = 2) -> Executable:
    nothing: Any = SimpleNamespace(graph=SimpleNamespace(nodes=()), parameters=tuple)
    binding = ProgramBinding(program(schedule, count), cells(first, last), (CPU, CPU), nothing, Mirrors())
    return Executable(binding)


def arrivals(parts: Sequence[torch.Tensor]) -> dict[tuple[str, bool], Any]:
    """Return what the host sends: the micro-batches, and as gradient of each loss its share of the mini-batch."""
    return {("x", False): list(parts), (LOSS, True): [torch.tensor(1 / len(parts)) for _ in parts]}
