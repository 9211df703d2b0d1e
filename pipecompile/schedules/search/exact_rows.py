"""The rows of a solution of the exact model: the actions of each device by their start."""

from __future__ import annotations

from typing import Any

from pipecompile.ir import Action, Kind
from pipecompile.schedules.search.exact_variables import ExactModel
from pipecompile.schedules.search.workload import Workload

__all__ = ["rows_of"]


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
