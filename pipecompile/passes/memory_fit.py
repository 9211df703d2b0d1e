"""Fitting a schedule into a memory limit: checks of arguments, the first moment over the limit, and the error."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir import Route, Schedule
from pipecompile.text.input_checks import whole
from pipecompile.text.shown_value import shown, type_text
from pipecompile.text.units import BYTES, written
from pipecompile.verifiers import verify
from pipecompile.verifiers.routes import checked_routes

__all__ = ["check_schedule", "checked_stages", "does_not_fit", "first_over"]


def check_schedule(schedule: Schedule, routes: Sequence[Route] | None) -> None:
    """Raise InputError if `schedule` is not a Schedule, and VerifyError if it is not legal."""
    if not isinstance(schedule, Schedule):
        hint = 'a schedule, such as pc.build_schedule("1f1b", 4, 16)'
        raise InputError(f"{type_text(schedule)} is not a Schedule", hint=hint)
    verify(schedule, routes=checked_routes(routes, schedule.n_stages))


def checked_stages(stages: object, n_stages: int) -> frozenset[int]:
    """Return a collection of stages as a set. Raise InputError if it is none, and ScheduleError for a stage that is not there."""
    if not isinstance(stages, Sequence | AbstractSet) or isinstance(stages, str | bytes):
        raise InputError(f"stages={shown(stages)} is not a collection of stages", hint="stages=[0, 1]")
    numbers = frozenset(whole(f"stages[{place}]", stage, 0) for place, stage in enumerate(stages))
    if unknown := sorted(numbers - set(range(n_stages))):
        raise ScheduleError(f"there is no stage {shown(unknown[0])}", why=f"stages are 0 to {n_stages - 1}")
    return numbers


def first_over(curve: Sequence[tuple[float, float]], limit: float) -> float | None:
    """Return the first time in seconds at which a device holds more than `limit` bytes; None if there is none."""
    return next((time for time, size in curve if size > limit * (1 + 1e-9)), None)


def does_not_fit(device: int, peak: float, limit: float, why: str, hint: str) -> InfeasibleError:
    """Return the error for a device whose peak, in bytes, stays above its limit."""
    return InfeasibleError(
        f"device {device} holds {written(BYTES, peak)} at its peak, {written(BYTES, limit)} are allowed",
        why=why,
        hint=hint,
    )
