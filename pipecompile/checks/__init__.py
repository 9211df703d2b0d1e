"""Verifiers, one a level: each reports everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.checks.program import Level, program_faults
from pipecompile.checks.routes import route_faults
from pipecompile.checks.schedule import schedule_faults
from pipecompile.errors import VerifyError
from pipecompile.ir import Program, Route, Schedule, chain

__all__ = ["Level", "verify", "verify_program", "verify_schedule"]


def verify(subject: Schedule | Program, *, routes: Sequence[Route] | None = None) -> None:
    """Return when `subject` is legal, raise VerifyError listing all faults when it is not.

    A schedule is checked under `routes`, a chain when None; a program carries its own.
    """
    match subject:
        case Schedule():
            verify_schedule(subject, routes)
        case Program():
            verify_program(subject)


def verify_schedule(schedule: Schedule, routes: Sequence[Route] | None = None) -> None:
    """Every action once, on its device, in an order that can be met. Raises VerifyError. Linear."""
    ways = chain(schedule.n_stages) if routes is None else routes
    faults = route_faults(ways, schedule.n_stages)
    if faults := [*faults, *schedule_faults(schedule, () if faults else ways)]:
        raise VerifyError(f"schedule {schedule.name!r}", faults)


def verify_program(program: Program, level: Level = Level.SLOTS) -> None:
    """Everything that holds up to `level`; a program that can run is legal at SLOTS. Raises VerifyError. Linear."""
    if faults := program_faults(program, level):
        raise VerifyError("program" if level is Level.SLOTS else f"program at level {level.name}", faults)
