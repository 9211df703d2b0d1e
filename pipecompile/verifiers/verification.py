"""Verifiers, one a level: each reports everything that is wrong at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import Action, Program, Route, Schedule, chain
from pipecompile.ir.gc_pause import without_collection
from pipecompile.verifiers.memory_bounds import byte_faults, in_flight_faults
from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel, models_named
from pipecompile.verifiers.program import Level, program_faults
from pipecompile.verifiers.routes import route_faults
from pipecompile.verifiers.schedule import schedule_faults
from pipecompile.verifiers.schedule_picture import marked

__all__ = ["ALL_MODELS", "Level", "MessageModel", "verify", "verify_program"]

PerDevice = float | Sequence[float]


@without_collection
def verify(
    subject: Schedule | Program,
    *,
    routes: Sequence[Route] | None = None,
    models: Iterable[str] | str = ("buffered", "rendezvous", "fifo"),
    in_flight: PerDevice | None = None,
    memory_limit: PerDevice | None = None,
    saved_bytes: float | Sequence[float] = 0.0,
) -> None:
    """Return when `subject` is legal, raise VerifyError listing all faults when it is not.

    A schedule is checked under `routes`, a chain when None; it has no messages yet, and what is legal can be lowered so
    that all models of communication hold. A program carries its routes, and may not deadlock in any of `models`: sends that
    never wait ("buffered"), sends that wait for their receive ("rendezvous"), messages between two devices that arrive in
    the order in which they were sent ("fifo").

    `in_flight` bounds the micro-batches in flight, one number or one per device. `memory_limit` bounds what the values of a
    program take, in bytes, when stage s saves `saved_bytes[s]` for a backward.
    """
    faults = _legal(subject, routes, models_named(models))
    if in_flight is not None:
        limit = _each("in_flight", in_flight, subject.n_devices, "devices")
        faults += in_flight_faults(_actions(subject), subject.placement, limit)
    if memory_limit is not None:
        if isinstance(subject, Schedule):
            raise InputError("memory_limit is for programs: a schedule does not say what moves", hint="lower it first")
        limit = _each("memory_limit", memory_limit, subject.n_devices, "devices")
        faults += [] if faults else byte_faults(subject, _sizes(subject, saved_bytes), limit)
    if faults and isinstance(subject, Schedule):
        raise VerifyError(f"schedule {subject.name!r}", faults, marked(subject.rows, faults))
    if faults:
        raise VerifyError("program", faults)


def _legal(subject: Schedule | Program, routes: Sequence[Route] | None, models: frozenset[MessageModel]) -> list[str]:
    if isinstance(subject, Program):
        return program_faults(subject, Level.SLOTS, models)
    ways = chain(subject.n_stages) if routes is None else routes
    faults = route_faults(ways, subject.n_stages)
    return [*faults, *schedule_faults(subject, () if faults else ways)]


def _actions(subject: Schedule | Program) -> list[list[Action]]:
    if isinstance(subject, Schedule):
        return [list(row) for row in subject.rows]
    return [[i.action for i in row if i.action is not None] for row in subject.rows]


def _each(name: str, given: float | Sequence[float], count: int, what: str) -> tuple[float, ...]:
    numbers = (float(given),) * count if isinstance(given, int | float) else tuple(given)
    if len(numbers) != count:
        raise InputError(f"{name} has {len(numbers)} numbers for {count} {what}", hint="one number, or one for each")
    return numbers


def _sizes(program: Program, saved_bytes: float | Sequence[float]) -> dict[str, float]:
    """By the name of a value. W's share of what was saved counts as all of it, the way back to it as nothing."""
    sizes = {route.value: route.nbytes for route in program.routes}
    for stage, size in enumerate(_each("saved_bytes", saved_bytes, program.n_stages, "stages")):
        sizes |= {f"@{stage}": size, f"@{stage}.w": size, f"@{stage}.r": 0.0}
    return sizes


def verify_program(program: Program, level: Level = Level.SLOTS) -> None:
    """Everything that holds up to `level`; a program that can run is legal at SLOTS. Raises VerifyError. Linear."""
    if faults := program_faults(program, level):
        raise VerifyError("program" if level is Level.SLOTS else f"program at level {level.name}", faults)
