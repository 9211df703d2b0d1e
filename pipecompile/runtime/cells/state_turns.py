"""Turns of threads that run user code: while one cell exchanges state, the cells of other stages wait.

    thread 1   B of stage 1: self.n = 3 (as its forward left it) ── hook ── self.n = 6 (as it was)
    thread 2   R of stage 2: waits ───────────────────────────────────────────────────────────── self.n = 4 ── ...

Backwards see attributes as their forward set them, recomputations undo later changes, and a loss gets the tensors of its own
micro-batch. Each restores at its end what it has replaced. Two at once would restore each other's values.

Threads that run copies of one stage share its parameters, buffers and code, so they take turns as well (`StageLocks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from threading import Lock, RLock

from pipecompile.ir import BACKWARDS, Action, Kind, Program
from pipecompile.runtime.cells.left_places import LeftPlaces
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.state.hidden_containers import identity

__all__ = ["StageLocks", "StateTurns"]


class StateTurns:
    """The turns of stages that have user code, or leave values on objects. `reaches`: some change what others hold, as
    recomputations and a loss that reads objects do, and all stages take turns. Else those do that have a container in common; until all
    have run once, all do. `hooked` are the stages whose backwards exchange state (`backward_reads.py`) in any run; where layers or
    gradients have hooks, all backwards do. None if no backward does.
    """

    def __init__(self, places: dict[int, LeftPlaces], *, reaches: bool, hooked: Collection[int] | None = None) -> None:
        self._places, self._hooked, self._lock = places, hooked, RLock()
        self._reaches = reaches or bool(hooked)
        self._near = dict[int, set[int]]()
        self._apart = frozenset[int]()

    @classmethod
    def of(
        cls,
        cells: Sequence[Cell | VariantCell],
        *,
        threaded: bool,
        reaches: bool,
        hooked: Collection[int] | None = None,
    ) -> StateTurns:
        """Return the turns of the stages of these cells; none in one thread."""
        effects = {stage: cell.all_effects for stage, cell in enumerate(cells if threaded else ())}
        stateful = {stage: each for stage, each in effects.items() if any(one.is_stateful for one in each)}
        places = {stage: LeftPlaces(each) for stage, each in stateful.items()}
        return cls(places, reaches=reaches, hooked=hooked if threaded else None)

    def around(self, run: Run, action: Action) -> Run:
        """Return the function of an action, which waits for its turn."""
        if action.stage in self._places:
            return run if len(self._places) == 1 and self._hooked is None else self._in_turn(run, action.stage)
        is_backward = action.kind in (*BACKWARDS, Kind.WEIGHT_GRAD)
        return run if self._hooked is None or not is_backward else self._if_hooked(run, action.stage in self._hooked)

    def _in_turn(self, run: Run, stage: int) -> Run:
        def in_turn(frame: Frame) -> None:
            if stage in self._apart and not frame.has_hooks:
                run(frame)
                return
            with self._lock:
                run(frame)
                if stage not in self._near and not self._reaches:
                    self._look(stage)

        return in_turn

    def _if_hooked(self, run: Run, is_hooked: bool) -> Run:
        """Return the function of a backward whose stage has no state of its own."""

        def if_hooked(frame: Frame) -> None:
            with self._lock if is_hooked or frame.has_hooks else nullcontext():
                run(frame)

        return if_hooked

    def _look(self, stage: int) -> None:
        """Note the containers near a stage. The last stage to be looked at tells which stages are apart."""
        self._near[stage] = {identity(one) for one in self._places[stage].containers()}
        if len(self._near) == len(self._places):
            counts = Counter(key for near in self._near.values() for key in near)
            self._apart = frozenset(s for s, near in self._near.items() if all(counts[key] == 1 for key in near))


class StageLocks:
    """A lock per stage of a program with several directions, if each device has a thread; no locks for others."""

    def __init__(self, program: Program, *, threaded: bool) -> None:
        self._locks = [Lock() for _ in program.placement] if program.directions and threaded else []

    def around(self, run: Run, action: Action) -> Run:
        """Return the function of an action, which waits while a copy of its stage computes."""
        if not self._locks:
            return run
        lock = self._locks[action.stage]

        def alone(frame: Frame) -> None:
            with lock:
                run(frame)

        return alone
