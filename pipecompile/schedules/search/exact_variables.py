"""The variables of the exact model, which `exact_model.py` builds and other modules extend, and the rows of a solution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipecompile.ir import Action, Kind
from pipecompile.schedules.search.ticks import Tick
from pipecompile.schedules.search.workload import Workload

__all__ = ["Copy", "ExactModel", "Key", "rows_of"]

Key = tuple[Kind, int, int]
"""Kind, stage and micro-batch. The backward of a cell has the key of I, whether it is I or B."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A message that takes time: when it leaves, its ticks, the engines that it occupies, and the end of the action that sends it."""

    leaves: Any
    ticks: int
    engines: tuple[object, ...]
    ready: Any


@dataclass(slots=True)
class ExactModel:
    """A model of CP-SAT with its variables: start, end and presence per action, and the makespan in ticks."""

    model: Any
    tick: Tick
    makespan: Any
    start: dict[Key, Any] = field(default_factory=dict)
    end: dict[Key, Any] = field(default_factory=dict)
    is_whole: dict[tuple[int, int], Any] = field(default_factory=dict)
    """Per stage and micro-batch, whether the backward is B. No entry if it is not free: then it is I and W, or B without a split."""
    recomputes: dict[int, Any] = field(default_factory=dict)
    """Per stage, whether it recomputes, if that is free."""
    arrivals: dict[Key, list[Any]] = field(default_factory=dict)
    """Per action, when the values that it reads arrive."""
    copies: list[Copy] = field(default_factory=list)
    split: bool = True

    @property
    def has_options(self) -> bool:
        """Whether some actions may be left out: R, or I and W in the place of B."""
        return bool(self.recomputes or self.is_whole)

    def least_above(self, seconds: float) -> float:
        """Return the shortest makespan that is left if none takes `seconds` or less: with whole ticks, the next one."""
        return (self.tick.down(seconds) + 1) * self.tick.size if self.tick.is_exact else seconds


def rows_of(model: ExactModel, value: Any, workload: Workload) -> tuple[tuple[Action, ...], ...]:
    """Return the rows of a solution: actions by their start. `value` returns the value of a variable or expression."""
    order = {kind: rank for rank, kind in enumerate((Kind.FORWARD, Kind.RECOMPUTE, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))}
    rows: list[list[tuple[Any, Action]]] = [[] for _ in range(workload.n_devices)]
    for (kind, s, m), start in model.start.items():
        whole = model.is_whole.get((s, m))
        if kind is Kind.RECOMPUTE and s in model.recomputes and not value(model.recomputes[s]):
            continue
        is_whole = not model.split or (whole is not None and bool(value(whole)))
        if is_whole and kind is Kind.WEIGHT_GRAD:
            continue
        rank = value(start), value(model.end[kind, s, m]), order[kind], s if kind is Kind.FORWARD else -s, m
        action = Action(s, Kind.BACKWARD if is_whole and kind is Kind.INPUT_GRAD else kind, m)
        rows[workload.placement[s]].append((rank, action))
    return tuple(tuple(action for _, action in sorted(row, key=lambda entry: entry[0])) for row in rows)
