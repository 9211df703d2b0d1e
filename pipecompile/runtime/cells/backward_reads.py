"""Attributes that a forward sets, restored for the backward of the same micro-batch: hooks and autograd functions read them.

    F0  self.scale = 2     F1  self.scale = 3     B0  self.scale = 2; hook: g * self.scale; self.scale = 3 again     B1

Another micro-batch may run its forward before the backward of this one. A value that the user or a backward has set stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from pipecompile.ir import BACKWARDS, UNTRAINED, Action, Kind, Program
from pipecompile.runtime.cells.left_places import LeftPlaces
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.registers import Frame, Run
from pipecompile.tracing.container_items import items_in
from pipecompile.tracing.state.effect_places import put_value, value_at

__all__ = ["BackwardReads"]


_Kept = dict[tuple[int, Any], tuple[dict[Any, Any], Any]]
"""By (id of a container, key), the container and the value that a forward has left there."""


class BackwardReads:
    """Keeps the values that the forwards of a program set in attributes and dicts until their backwards.

    `Frame.kept` has, by stage and micro-batch, the values by container and key. A backward sees the values that the forwards of all
    stages have set for its micro-batch. With threads, a backward that runs no user code sees the present values, since other threads
    must not see the exchange.
    """

    def __init__(self, stages: dict[int, _LeftKeys], hooked: Collection[int] = (), *, threaded: bool = False) -> None:
        self._stages, self._hooked, self._threaded = stages, hooked, threaded
        self._ends = Counter[int]()  # per micro-batch, the number of wrapped backwards
        self._lock = Lock()  # of `Frame.kept`, `Frame.exchanged` and `Frame.ended`, which all threads of a run change

    @property
    def hooked(self) -> Collection[int] | None:
        """The stages whose backwards always exchange attributes; None if no attributes are kept."""
        return self._hooked if self._stages else None

    @classmethod
    def of(cls, program: Program, cells: Sequence[Cell | VariantCell], *, threaded: bool = False) -> BackwardReads:
        """Return the BackwardReads for the stages of these cells. Without a backward in the program, no attributes are kept."""
        trains = any(i.action is not None and i.action.kind not in UNTRAINED for row in program.rows for i in row)
        effects = {stage: cell.all_effects for stage, cell in enumerate(cells if trains else ())}
        leaves = {stage: each for stage, each in effects.items() if any(one.leaves_values for one in each)}
        keys = {stage: _LeftKeys(LeftPlaces(each)) for stage, each in leaves.items()}
        return cls(keys, _hooked_stages(cells), threaded=threaded)

    def around(self, run: Run, action: Action) -> Run:
        """Wrap the function of an action: a forward notes the values that it sets, and a backward sees them."""
        keys = self._stages.get(action.stage)
        if action.kind is Kind.FORWARD:
            return run if keys is None else self._noting(run, (action.stage, action.microbatch), keys)
        is_backward = action.kind in (*BACKWARDS, Kind.WEIGHT_GRAD)
        return self._reading(run, action) if is_backward and self._stages else run

    def _noting(self, run: Run, key: tuple[int, int], keys: _LeftKeys) -> Run:
        def noting(frame: Frame) -> None:
            before = keys.contents()
            run(frame)
            keys.note(before)
            with self._lock:
                frame.kept[key] = keys.values()

        return noting

    def _reading(self, run: Run, action: Action) -> Run:
        microbatch = action.microbatch
        keys, is_end = [(stage, microbatch) for stage in self._stages], action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
        self._ends[microbatch] += is_end
        is_seen = action.stage in self._hooked or not self._threaded

        def reading(frame: Frame) -> None:
            if is_seen or frame.has_hooks:
                self._run_with(run, frame, keys)
            else:
                run(frame)
            if is_end:
                self._end(frame, keys, microbatch)

        return reading

    def _run_with(self, run: Run, frame: Frame, keys: Sequence[tuple[int, int]]) -> None:
        """Run a backward that sees the values that the forwards of these stages and micro-batches have set."""
        with self._lock:
            replaced = {place: one for key in keys for place, one in _replace(frame, key).items()}
        try:
            run(frame)
        finally:
            with self._lock:
                for place, (held, own) in replaced.items():
                    now = frame.exchanged.pop(place)
                    if value_at(held, place[1]) is own:
                        put_value(held, place[1], now)

    def _end(self, frame: Frame, keys: Sequence[tuple[int, int]], microbatch: int) -> None:
        """Count a finished backward. After the last of its micro-batch, which any stage can have, forget the values."""
        with self._lock:
            frame.ended[microbatch] += 1
            for key in keys if frame.ended[microbatch] == self._ends[microbatch] else ():
                _forget(frame, key)


def _hooked_stages(cells: Sequence[Cell | VariantCell]) -> frozenset[int]:
    """Return the stages whose backward, including that of the loss, may run user code."""
    effects = enumerate(cell.all_effects for cell in cells)
    return frozenset(stage for stage, each in effects if any(one.hooks_backward or one.holders for one in each))


class _LeftKeys:
    """The keys, in the dicts that a stage can reach, whose values its forwards have replaced."""

    def __init__(self, places: LeftPlaces) -> None:
        self._places = places
        self._known: dict[tuple[int, Any], dict[Any, Any]] = {}

    @cached_property
    def _dicts(self) -> list[dict[Any, Any]]:
        return [one for one in self._places.containers() if isinstance(one, dict)]

    def contents(self) -> list[dict[Any, Any]]:
        """Return copies of the dicts."""
        return [dict(items_in(one)) for one in self._dicts]

    def note(self, before: Sequence[dict[Any, Any]]) -> None:
        """Note the keys whose values have changed since `before`."""
        for held, old in zip(self._dicts, before, strict=True):
            for name, value in items_in(held):
                if name not in old or old[name] is not value:
                    self._known[id(held), name] = held

    def values(self) -> _Kept:
        """Return, by container and key, the container and its present value."""
        return {key: (held, value_at(held, key[1])) for key, held in self._known.items()}


def _forget(frame: Frame, key: tuple[int, int]) -> None:
    """Drop the values of a forward, except those in place now, or again after the backward of another thread: `_replace` recognises
    them while earlier micro-batches have a backward left.
    """
    left = frame.kept.pop(key, {})
    stays = {place: (held, own) for place, (held, own) in left.items() if _settled(frame, place, held) is own}
    if stays:
        frame.kept[key] = stays


def _settled(frame: Frame, place: tuple[int, Any], held: dict[Any, Any]) -> Any:
    """Return the value of a place once no backward exchanges values."""
    return frame.exchanged[place] if place in frame.exchanged else value_at(held, place[1])


def _replace(frame: Frame, key: tuple[int, int]) -> _Kept:
    """Put the values of the forward of a stage and micro-batch where later forwards have replaced them. Return those."""
    later = [kept for (stage, _), kept in frame.kept.items() if stage == key[0]]
    replaced: _Kept = {}
    for place, (held, own) in frame.kept.get(key, {}).items():
        now = value_at(held, place[1])
        if now is not own and any(place in kept and kept[place][1] is now for kept in later):
            put_value(held, place[1], own)
            frame.exchanged[place], replaced[place] = now, (held, own)
    return replaced
