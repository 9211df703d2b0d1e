"""Turns of threads that run Python of the user's: a cell that exchanges state for a while must not be seen by the cells of other stages.

    thread 1   B of stage 1: self.n = 3 (as its forward left it) ── hook ── self.n = 6 (as it was)
    thread 2   R of stage 2: waits ───────────────────────────────────────────────────────────── self.n = 4 ── ...

Backwards find attributes as their forward left them, recomputations undo what has changed since, and a loss gets the tensors of its own
micro-batch. Each of them puts back what it found. Two of them at once would put back what the other one had put there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import RLock

from pipecompile.ir import Action
from pipecompile.runtime.cells.left_places import LeftPlaces
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.state.hidden_containers import identity

__all__ = ["StateTurns"]


class StateTurns:
    """The turns of stages that have Python of the user's, or leave values on objects. `reaches`: some change what others hold, as
    recomputations and a loss that reads objects do, and all stages take turns. Else those do that have a container in common; until all
    have run once, all do.
    """

    def __init__(self, places: dict[int, LeftPlaces], *, reaches: bool) -> None:
        self._places, self._reaches, self._lock = places, reaches, RLock()
        self._near = dict[int, set[int]]()
        self._apart = frozenset[int]()

    @classmethod
    def of(cls, cells: Sequence[Cell | VariantCell], *, threaded: bool, reaches: bool) -> StateTurns:
        """Return the turns of the stages of these cells. In one thread there are none."""
        effects = {stage: cell.all_effects for stage, cell in enumerate(cells if threaded else ())}
        stateful = {stage: each for stage, each in effects.items() if any(one.is_stateful for one in each)}
        return cls({stage: LeftPlaces(each) for stage, each in stateful.items()}, reaches=reaches)

    def around(self, run: Run, action: Action) -> Run:
        """Return the function of an action, which waits for its turn."""
        stage = action.stage
        if stage not in self._places or len(self._places) == 1:
            return run

        def in_turn(frame: Frame) -> None:
            if stage in self._apart:
                run(frame)
                return
            with self._lock:
                run(frame)
                if stage not in self._near and not self._reaches:
                    self._look(stage)

        return in_turn

    def _look(self, stage: int) -> None:
        """Note the containers near a stage. The last stage to be looked at tells which stages are apart."""
        self._near[stage] = {identity(one) for one in self._places[stage].containers()}
        if len(self._near) == len(self._places):
            counts = Counter(key for near in self._near.values() for key in near)
            self._apart = frozenset(s for s, near in self._near.items() if all(counts[key] == 1 for key in near))
