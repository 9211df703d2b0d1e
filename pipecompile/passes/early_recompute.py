"""Move recomputations into times when the device waits, before the gradient arrives, as far as memory allows.

    device 0 │ F0 F1 F2 R0       B0 B0 R1 B1 B1 R2 B2 B2       before: device 0 waits for the first gradient,
    device 1 │    F0 F1 F2 B0 B0 B1 B1 B2 B2                   and later R1 and R2 delay other devices

    device 0 │ F0 F1 F2 R0 R1 R2 B0 B0 B1 B1 B2 B2             after, with room for three

An R moves into a wait that is long enough, so that nothing starts later than before. Then the times are simulated
again, until no R moves. Linear in the number of actions, per round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from pipecompile.ir import BACKWARDS, Action, Kind, Route, Schedule, chain
from pipecompile.simulation.costs import CostOptions, make_costs
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_schedule import tasks_of_schedule

__all__ = ["advance_recompute"]

_ROUNDS = 20
"""Largest number of rounds of moving and simulating."""


def advance_recompute(
    schedule: Schedule, restored: int = 2, *, routes: Sequence[Route] | None = None, **cost_options: Unpack[CostOptions]
) -> Schedule:
    """Return the same actions with every R in the first wait of its device that is long enough.

    The schedule must be legal. A device holds at most `restored` micro-batches, or slices, whose R has run and whose B or I has
    not. Costs are those of `simulate`.
    """
    all_routes = chain(schedule.n_stages) if routes is None else routes
    costs = make_costs(schedule.n_stages, schedule.n_devices, all_routes, (), schedule.n_slices, **cost_options)
    for _ in range(_ROUNDS):
        tasks = tasks_of_schedule(schedule, all_routes, costs)
        times = walk(tasks, costs.engines)
        rows = []
        for tasks_of_row, row in zip(tasks.rows, schedule.rows, strict=True):
            ends = [0.0, *(times.end[task] for task in tasks_of_row)]
            waits = [times.start[task] - ends[index] for index, task in enumerate(tasks_of_row)]
            for index in range(1, len(row)):
                if (row[index - 1], row[index]) in schedule.overlaps:
                    waits[index] = 0.0  # nothing comes between two actions that overlap
            rows.append(_filled(row, waits, [tasks.seconds[task] for task in tasks_of_row], restored))
        if tuple(rows) == schedule.rows:
            break
        schedule = replace(schedule, rows=tuple(rows), certificate=None)
    return schedule


def _filled(row: Sequence[Action], waits: list[float], seconds: list[float], most: int) -> tuple[Action, ...]:
    """Return the row with each R moved before the first action i whose wait, `waits[i]` seconds, is long enough."""
    restored = _restored_counts(row)
    later = [index for index, action in enumerate(row) if action.kind is Kind.RECOMPUTE]
    begun = _begun(row)
    moved: dict[int, list[int]] = {}
    for index, gap in enumerate(waits):
        wait, later = gap, [r for r in later if r > index]
        while wait > 0 and later:
            r = later[0]
            ready = begun[r] < index
            if not ready or seconds[r] > wait or max(restored[index:r]) >= most:
                break
            restored[index:r] = [count + 1 for count in restored[index:r]]
            moved.setdefault(index, []).append(later.pop(0))
            wait -= seconds[r]
    moved_from = {r for several in moved.values() for r in several}
    return tuple(
        action
        for index in range(len(row))
        for action in (*(row[r] for r in moved.get(index, ())), *(() if index in moved_from else (row[index],)))
    )


def _begun(row: Sequence[Action]) -> dict[int, int]:
    """Return, by the index of an R, the index of its F, or of the UNSHARD of its stage if that comes later."""
    forward: dict[tuple[int, int, int], int] = {}
    gathered: dict[int, int] = {}
    begun: dict[int, int] = {}
    for index, action in enumerate(row):
        if action.kind is Kind.FORWARD:
            forward[action.cell] = index
        elif action.kind is Kind.UNSHARD:
            gathered[action.stage] = index
        elif action.kind is Kind.RECOMPUTE:
            begun[index] = max(forward[action.cell], gathered.get(action.stage, -1))
    return begun


def _restored_counts(row: Sequence[Action]) -> list[int]:
    """Return, per index, the number of restored micro-batches when the action there begins."""
    counts, held = [], 0
    restored = {a.cell for a in row if a.kind is Kind.RECOMPUTE}
    for action in row:
        counts.append(held)
        if action.kind is Kind.RECOMPUTE:
            held += 1
        elif action.kind in BACKWARDS:
            held -= action.cell in restored
    return counts
