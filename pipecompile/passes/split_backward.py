"""Split every full backward B into I, on whose result other stages wait, and W, which may run later.

    before   0F0 0F1 0B0 0B1
    after    0F0 0F1 0I0 0W0 0I1 0W1            delay 0
             0F0 0F1 0I0 0I1 0W0 0W1            delay 1: one more action of the row goes before each W

A W beyond the end of the row comes at its end, and none comes between two actions that overlap, nor
behind an action on the parameters of its stage. Linear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pipecompile.ir import SHARDING, Action, Kind, Schedule
from pipecompile.ir.overlap import firsts

__all__ = ["split_backward"]


def split_backward(schedule: Schedule, delay: int = 0) -> Schedule:
    """Return the same order with I in place of B, and W after another `delay` actions of the row."""
    begins = firsts(schedule.overlaps)
    rows = tuple(tuple(_row(row, delay, begins)) for row in schedule.rows)
    overlaps = frozenset((first, _halved(second)) for first, second in schedule.overlaps)
    return replace(schedule, rows=rows, name=f"{schedule.name} split", certificate=None, overlaps=overlaps)


def _halved(action: Action) -> Action:
    return replace(action, kind=Kind.INPUT_GRAD) if action.kind is Kind.BACKWARD else action


def _row(row: Sequence[Action], delay: int, begins: Collection[Action]) -> Iterator[Action]:
    waiting: deque[tuple[int, Action]] = deque()
    for index, action in enumerate(row):
        if action.kind in SHARDING:
            yield from (one for _, one in waiting if one.stage == action.stage)
            waiting = deque(one for one in waiting if one[1].stage != action.stage)
        yield _halved(action)
        if action.kind is Kind.BACKWARD:
            waiting.append((index + delay, replace(action, kind=Kind.WEIGHT_GRAD)))
        while waiting and waiting[0][0] <= index and action not in begins:
            yield waiting.popleft()[1]
    yield from (action for _, action in waiting)
