"""The induction of `verifiers/periodic.py` on arrays: what is shown for few repetitions holds for all.

    legal with n and with n + 1 repetitions, and what is over when two repetitions are is, a period later, what is over when one is

The periods are in order, as `verifiers/periodic.py` has found before. Linear in the items of n repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import Route
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.ir.program_arrays import ProgramArrays, Templates
from pipecompile.verifiers.array_program import is_legal
from pipecompile.verifiers.array_schedule import waits_of_legal
from pipecompile.verifiers.array_waits import Meetings, count_meetings

__all__ = ["is_legal_program", "is_legal_schedule"]

Ints = NDArray[np.int64]


def is_legal_schedule(schedule: PeriodicSchedule, routes: Sequence[Route], few: int) -> bool:
    """Return True if a schedule is legal, by induction from `few` repetitions or more; False if it is not, or arrays cannot say so."""
    first, each = (np.array([len(row) for row in part]) for part in (schedule.prologue, schedule.period))
    count = few
    while count + 1 < schedule.repetitions:
        waits = waits_of_legal(schedule, routes, count)
        if waits is None:
            return False
        if _is_later_by(each, [waits.closed(first + index * each) for index in (1, 2)], first + count * each):
            return waits_of_legal(schedule, routes, count + 1) is not None
        count *= 2
    return waits_of_legal(schedule, routes, schedule.repetitions) is not None


def _is_later_by(each: Ints, states: Sequence[Ints], end: Ints) -> bool:
    """Return whether the second state is the first one a period later, and within the repetitions."""
    one, two = states
    return bool((two - one == each).all() and (two <= end).all())


def is_legal_program(program: PeriodicProgram, few: int) -> bool:
    """Return True if a program is legal in all models of communication, by the same induction; False if it is not, or arrays cannot say so."""
    if program.ties:
        return False
    count = few
    while count + 1 < program.repetitions:
        arrays = program.arrays(count)
        if not is_legal(arrays):
            return False
        if _recurs(program, arrays, count):
            return is_legal(program.arrays(count + 1))
        count *= 2
    return is_legal(program.arrays(program.repetitions))


def _recurs(program: PeriodicProgram, arrays: ProgramArrays, count: int) -> bool:
    """Return whether what is done when two repetitions are over is what is done after one, a period later, and within the last."""
    templates = Templates(arrays.table.templates)
    meetings = Meetings.of(arrays, templates)
    first, each = (
        2 * np.array([count_meetings(arrays.table.row(row).numbers, templates) for row in part])
        for part in (program.prologue, program.period)
    )
    return _is_later_by(each, [meetings.closed(first + index * each) for index in (1, 2)], first + count * each)
