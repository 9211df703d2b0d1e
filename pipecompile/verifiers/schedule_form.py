"""The form of a schedule that was made by hand: its counts, placement and rows have the types that the other checks need.

Schedule(2, 4, (0, 1), (("0F0",), ()))      row 0 has '0F0', expected an Action: Schedule.from_rows([["0F0"]])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral

from pipecompile.errors import VerifyError
from pipecompile.ir import Action, Kind, Schedule
from pipecompile.ir.directions import directions_fault
from pipecompile.ir.periodic import MOST_REPETITIONS, PeriodicSchedule
from pipecompile.ir.slices import first_slice
from pipecompile.ir.written_program import overlaps_fault
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["check_form", "form_faults"]


def check_form(schedule: Schedule | PeriodicSchedule) -> None:
    """Raise VerifyError with the faults of a schedule whose counts, placement or rows have other types."""
    if faults := form_faults(schedule):
        name = "periodic schedule" if isinstance(schedule, PeriodicSchedule) else f"schedule {shown(schedule.name)}"
        raise VerifyError(name, faults)


def form_faults(schedule: Schedule | PeriodicSchedule) -> list[str]:
    """Return a fault for each part with another type, and for counts without an end. Linear."""
    is_periodic = isinstance(schedule, PeriodicSchedule)
    counts = ("n_stages", "repetitions", "step") if is_periodic else ("n_stages", "n_microbatches", "n_slices")
    faults = [*_count_faults(schedule, counts), *_placement_faults(schedule)]
    if isinstance(schedule, Schedule):
        faults += filter(None, (overlaps_fault(schedule.overlaps), directions_fault(schedule.directions)))
    for part in ("prologue", "period", "epilogue") if is_periodic else ("rows",):
        faults += _row_faults(part, getattr(schedule, part))
    if (
        isinstance(schedule, PeriodicSchedule)
        and not faults
        and (sliced := first_slice((*schedule.prologue, *schedule.period, *schedule.epilogue)))
    ):
        faults.append(f"{sliced} is on a slice, and a periodic schedule has whole micro-batches")
    return faults


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_few(value: object) -> bool:
    return _is_whole(value) and abs(value) <= MOST_REPETITIONS  # type: ignore[arg-type]


def _count_faults(schedule: Schedule | PeriodicSchedule, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        value = getattr(schedule, name)
        if not _is_whole(value):
            yield f"{name} is {shown(value)}, expected a whole number"
        elif abs(value) > MOST_REPETITIONS:
            yield f"{name} is {shown(value)}, expected at most {MOST_REPETITIONS:,}"


def _placement_faults(schedule: Schedule | PeriodicSchedule) -> Iterator[str]:
    placement = schedule.placement
    if not isinstance(placement, tuple) or not all(map(_is_few, placement)):
        yield f"placement is {shown(placement)}, expected a tuple with the device of each stage: (0, 1)"
    elif _is_whole(schedule.n_stages) and len(placement) != schedule.n_stages:
        yield f"{counted(len(placement), 'stage')} {'is' if len(placement) == 1 else 'are'} placed, there are {shown(schedule.n_stages)}"


def _row_faults(part: str, rows: object) -> Iterator[str]:
    if not isinstance(rows, tuple) or not all(isinstance(row, tuple) for row in rows):
        yield f'{part} is {shown(rows)}, expected a tuple of actions per device: Schedule.from_rows([["0F0"]])'
        return
    if {type(action) for row in rows for action in row} <= {Action} and _has_numbers(rows):
        return
    for device, row in enumerate(rows):
        strange = next(((action,) for action in row if not _is_action(action)), ())
        for action in strange:
            yield f'row {device} of {part} has {shown(action)}, expected an Action: Schedule.from_rows([["0F0"]])'


def _has_numbers(rows: tuple[tuple[Action, ...], ...]) -> bool:
    """Return whether the fields of all actions have the very types that they should have: the usual case, in a third of the time."""
    types = {(type(a.stage), type(a.kind), type(a.microbatch), type(a.slice)) for row in rows for a in row}
    return types <= {(int, Kind, int, int)} and all(
        max(abs(a.stage), abs(a.microbatch), abs(a.slice)) <= MOST_REPETITIONS for row in rows for a in row
    )


def _is_action(action: object) -> bool:
    return (
        isinstance(action, Action)
        and isinstance(action.kind, Kind)
        and _is_few(action.stage)
        and _is_few(action.microbatch)
        and _is_few(action.slice)
    )
