"""Random draws of backwards: of hooks on gradients, of backwards of `torch.autograd.Function`, and of regions that draw anew.

No graph shows them. So the backward of the first micro-batch is watched once in each stage, and once more when hooks were registered.
"""

from __future__ import annotations

from typing import Any

import torch

from pipecompile.ir import Action, Kind
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.held_hooks import HeldHooks
from pipecompile.runtime.interpreter import CodeBuilder
from pipecompile.runtime.random_draws import ForwardDraws
from pipecompile.runtime.registers import CellRegisters, Frame, Run
from pipecompile.tracing.interception.randomness import RandomDrawCounter
from pipecompile.tracing.recompute_flag import is_recomputing_region
from pipecompile.tracing.state.random_states import RandomSource, RandomStates, python_sources

__all__ = ["BackwardDraws", "WatchingBuilder"]


class BackwardDraws:
    """The stages whose backward was seen to draw random numbers."""

    def __init__(self) -> None:
        self.stages: set[int] = set()
        self._round = 0

    def watch_again(self) -> None:
        """Watch the next run of each backward: it has other hooks."""
        self._round += 1

    def watched(self, run: Run, stage: int, *, is_alone: bool = True) -> Run:
        """Return the function of a backward of a stage, whose first run of a round is watched. `is_alone`: no other thread draws in Python
        meanwhile.
        """
        watched = -1

        def function(frame: Frame) -> None:
            nonlocal watched
            if watched == self._round:
                run(frame)
                return
            watched = self._round
            self._watched_run(run, frame, stage, python_sources() if is_alone else [])

        return function

    def _watched_run(self, run: Run, frame: Frame, stage: int, sources: list[RandomSource]) -> None:
        before, counter = RandomStates(sources), _NewDraws()
        with counter:
            run(frame)
        if counter.count or before.changed():
            self.stages.add(stage)


class WatchingBuilder(CodeBuilder):
    """Makes functions that note in `draws` which backwards draw, and in `forwards` which forwards do although no node shows it.

    On GPUs, which have a generator each, none is watched. In threads no forward is: others draw meanwhile. Backwards pass their
    gradients through `held`.
    """

    def __init__(
        self, draws: BackwardDraws, forwards: ForwardDraws, held: HeldHooks, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.draws, self.forwards, self.held = draws, forwards, held
        held.joins = self.joins

    def forward_of(self, cell: Cell, action: Action, registers: CellRegisters, device: torch.device) -> Run:
        """Return the function of an F or an R of one cell."""
        run, effects = super().forward_of(cell, action, registers, device), cell.effects
        if self.threaded or action.kind is Kind.RECOMPUTE or device.type != "cpu" or not effects.runs_python:
            return run
        return run if effects.draws else self.forwards.watched(run, action.stage, effects.generators)

    def backward(self, action: Action, registers: CellRegisters, device: torch.device) -> Run:
        """Return the function of a B, I or W."""
        run = self.held.around(super().backward(action, registers, device), action)
        is_watched = action.microbatch == 0 and device.type == "cpu"
        is_alone = not (self.threaded and any(one.draws for cell in self.cells for one in cell.all_effects))
        return self.draws.watched(run, action.stage, is_alone=is_alone) if is_watched else run


class _NewDraws(RandomDrawCounter):  # type: ignore[no-untyped-call]
    """Counts draws, except those of a recomputed region, which repeats the draws of its forward unless it has its own generators."""

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_recomputing_region() and kwargs.get("generator") is None:
            return func(*args, **kwargs)
        return super().observe(func, args, kwargs)
