"""Run recomputations while the device would wait anyway, ahead of the gradient's arrival, as far as memory allows.

    device 0 │ F0 F1 F2 R0       B0 B0 R1 B1 B1 R2 B2 B2       before: device 0 waits for the first gradient,
    device 1 │    F0 F1 F2 B0 B0 B1 B1 B2 B2                   and later makes others wait for R1 and R2

    device 0 │ F0 F1 F2 R0 R1 R2 B0 B0 B1 B1 B2 B2             after, with room for three

An R is moved into a wait that it fits into, so nothing starts later than before; then the times are taken anew, until no R
moves. Linear in the number of actions, per round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from pipecompile.ir import Action, Kind, Route, Schedule, chain
from pipecompile.simulation.costs import CostOptions, make_costs
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_schedule import tasks_of_schedule

__all__ = ["advance_recompute"]

_ROUNDS = 20


def advance_recompute(
    schedule: Schedule, restored: int = 2, *, routes: Sequence[Route] | None = None, **given: Unpack[CostOptions]
) -> Schedule:
    """The same actions, every R where the device has the time for it. The schedule must be legal.

    A device holds at most `restored` micro-batches whose R ran and whose B or I did not. Costs are those of `simulate`.
    """
    ways = chain(schedule.n_stages) if routes is None else routes
    costs = make_costs(schedule.n_stages, schedule.n_devices, ways, **given)
    for _ in range(_ROUNDS):
        tasks = tasks_of_schedule(schedule, ways, costs)
        times = walk(tasks, costs.engines)
        rows = []
        for own, row in zip(tasks.rows, schedule.rows, strict=True):
            ends = [0.0, *(times.end[task] for task in own)]
            waits = [times.start[task] - ends[index] for index, task in enumerate(own)]
            rows.append(_filled(row, waits, [tasks.seconds[task] for task in own], restored))
        if tuple(rows) == schedule.rows:
            break
        schedule = replace(schedule, rows=tuple(rows))
    return schedule


def _filled(row: Sequence[Action], waits: list[float], seconds: list[float], most: int) -> tuple[Action, ...]:
    """`waits[i]` is how long the device waits before action i. A later R goes there when it fits."""
    held = _held(row)
    later = [index for index, action in enumerate(row) if action.kind is Kind.RECOMPUTE]
    forward = {(a.stage, a.microbatch): index for index, a in enumerate(row) if a.kind is Kind.FORWARD}
    moved: dict[int, list[int]] = {}
    for index, left in enumerate(waits):
        wait, later = left, [r for r in later if r > index]
        while wait > 0 and later:
            r = later[0]
            ready = forward[row[r].stage, row[r].microbatch] < index
            if not ready or seconds[r] > wait or max(held[index:r]) >= most:
                break
            held[index:r] = [count + 1 for count in held[index:r]]
            moved.setdefault(index, []).append(later.pop(0))
            wait -= seconds[r]
    gone = {r for several in moved.values() for r in several}
    return tuple(
        action
        for index in range(len(row))
        for action in (*(row[r] for r in moved.get(index, ())), *(() if index in gone else (row[index],)))
    )


def _held(row: Sequence[Action]) -> list[int]:
    """Per place, how many micro-batches are restored when the action there begins."""
    counts, held = [], 0
    restored = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
    for action in row:
        counts.append(held)
        if action.kind is Kind.RECOMPUTE:
            held += 1
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            held -= (action.stage, action.microbatch) in restored
    return counts
