"""A known schedule in the exact model: as a hint, or as the order of all actions outside a window of time.

    device 0    F0 F1 │ F2 I0 F3 │ I1 W0 ...
    device 1       F0 │ I0 F1 I1 │ W0 ...
                      └─ window ─┘

The order is free inside the window. Outside it, every action stays after the action before it that is outside as well. All times are free.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.ir import Kind, Schedule
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.exact_variables import ExactModel, Key
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_schedule import tasks_of_schedule

__all__ = ["add_hint", "keep_order"]


def add_hint(built: ExactModel, incumbent: Schedule, evaluator: Evaluator) -> None:
    """Add the times of the incumbent in ticks as a hint."""
    tasks, tick = tasks_of_schedule(incumbent, evaluator.routes, evaluator.costs), built.tick
    tasks.seconds = [float(tick.down(seconds)) for seconds in tasks.seconds]
    tasks.delays = [float(tick.down(seconds)) for seconds in tasks.delays]
    times = walk(tasks, evaluator.costs.engines)
    recomputed = set()
    for action, start, end in zip(tasks.actions, times.start, times.end, strict=True):
        if action is None:
            continue
        s, m, kind = action.stage, action.microbatch, action.kind
        cell = Kind.INPUT_GRAD if kind is Kind.BACKWARD else kind
        if (cell, s, m) in built.start:
            built.model.add_hint(built.start[cell, s, m], int(start))
        if kind is Kind.RECOMPUTE:
            recomputed.add(s)
        if (s, m) in built.is_whole and cell is Kind.INPUT_GRAD:
            built.model.add_hint(built.is_whole[s, m], kind is Kind.BACKWARD)
            if kind is Kind.BACKWARD:
                built.model.add_hint(built.start[Kind.WEIGHT_GRAD, s, m], int(end))
    for s, flag in built.recomputes.items():
        built.model.add_hint(flag, s in recomputed)


def keep_order(built: ExactModel, incumbent: Schedule, evaluator: Evaluator, window: tuple[float, float]) -> None:
    """Add the order of the incumbent for the actions that do not run within the window, from and to shares of its makespan."""
    for row in _timed_rows(built, incumbent, evaluator):
        before: Key | None = None
        for key, begin, end in row:
            if begin >= window[1] or end <= window[0]:
                if before is not None:
                    built.model.add(built.start[key] >= built.end[before])
                before = key


def _timed_rows(
    built: ExactModel, incumbent: Schedule, evaluator: Evaluator
) -> Iterator[list[tuple[Key, float, float]]]:
    """Yield, per device, the key, begin and end of its actions in the order of the row, as shares of the makespan."""
    tasks = tasks_of_schedule(incumbent, evaluator.routes, evaluator.costs)
    times = walk(tasks, evaluator.costs.engines)
    step = max(times.makespan, 1e-300)
    for row in tasks.rows:
        timed = []
        for task in row:
            if (action := tasks.actions[task]) is not None:
                kind = Kind.INPUT_GRAD if action.kind is Kind.BACKWARD else action.kind
                timed.append(
                    ((kind, action.stage, action.microbatch), times.start[task] / step, times.end[task] / step)
                )
        yield [each for each in timed if each[0] in built.start]
