"""The entry points of the verifiers: check a schedule or a program, and raise one VerifyError with all faults.

Faults of a program that a user wrote have the lines of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import Program, Route, Schedule
from pipecompile.ir.directions import copies_placed
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.in_flight import action_rows
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.ir.written_program import WrittenProgram, type_faults
from pipecompile.text.input_checks import amounts
from pipecompile.text.shown_value import shown
from pipecompile.verifiers.memory_bounds import byte_faults, in_flight_faults
from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel, models_named
from pipecompile.verifiers.periodic import periodic_program_faults, periodic_schedule_faults
from pipecompile.verifiers.program import Level, program_faults
from pipecompile.verifiers.routes import route_faults, route_sequence
from pipecompile.verifiers.schedule import schedule_faults
from pipecompile.verifiers.schedule_form import check_form
from pipecompile.verifiers.schedule_picture import marked

__all__ = ["ALL_MODELS", "Level", "MessageModel", "verify", "verify_program", "verify_written"]

PerDevice = float | Sequence[float]
"""One number for all devices, or one per device."""


@without_collection
def verify(
    subject: Schedule | Program | PeriodicSchedule | PeriodicProgram,
    *,
    routes: Sequence[Route] | None = None,
    models: Iterable[str] | str = ("buffered", "rendezvous", "fifo"),
    in_flight: PerDevice | None = None,
    memory_limit: PerDevice | None = None,
    saved_bytes: float | Sequence[float] = 0.0,
    unsharded_bytes: float | Sequence[float] = 0.0,
) -> None:
    """Return None if `subject` is legal, raise VerifyError listing all faults if not.

    `routes` are those of a schedule; None means a chain of stages. A schedule has no messages yet: a legal schedule can
    be lowered to a program that is legal in all models of communication. A program carries its own routes and must not
    deadlock in any of `models`: "buffered" (sends never wait), "rendezvous" (sends wait for their receives), "fifo"
    (messages between two devices arrive in the order in which they were sent).

    `in_flight` is the largest allowed number of micro-batches (or of slices) in flight, one number or one per device. `memory_limit`
    is the largest allowed size in bytes of a program's live values, one number or one per device, where stage s saves
    `saved_bytes[s]` bytes for a backward, and holds `unsharded_bytes[s]` of gathered parameters from UNSHARD to RESHARD.

    Of a periodic schedule or program a few repetitions are verified, and the others by induction (`verifiers/periodic.py`): faults are
    those of the few.
    """
    if not isinstance(subject, Schedule | Program | PeriodicSchedule | PeriodicProgram):
        raise InputError(
            f"{type(subject).__name__} is neither a Schedule nor a Program",
            hint='pc.build_schedule("1f1b", 4, 8), or the program of a pipeline: pipe.program',
        )
    if isinstance(subject, Schedule | PeriodicSchedule):
        check_form(subject)
    elif types := list(type_faults(subject)):
        raise VerifyError(_NAMES[type(subject)], types)
    faults = _legal(subject, routes, models_named(models))
    few, is_limited = subject, in_flight is not None or memory_limit is not None
    if isinstance(subject, PeriodicSchedule | PeriodicProgram) and is_limited and not faults:
        few = subject.unrolled(min(_SEVERAL, subject.repetitions))
    if isinstance(few, Schedule | Program):
        stage_bytes = saved_bytes, unsharded_bytes
        faults += _limit_faults(few, in_flight, memory_limit, stage_bytes, is_legal=not faults)
    if faults and isinstance(subject, Schedule):
        raise VerifyError(f"schedule {shown(subject.name)}", faults, marked(subject.rows, faults))
    if faults:
        raise VerifyError(_NAMES[type(subject)], faults)


_NAMES = {Program: "program", PeriodicSchedule: "periodic schedule", PeriodicProgram: "periodic program"}

_SEVERAL = 2
"""Repetitions that hold what all hold: a repetition ends with what it began with."""


def _limit_faults(
    few: Schedule | Program,
    in_flight: PerDevice | None,
    memory_limit: PerDevice | None,
    stage_bytes: tuple[float | Sequence[float], float | Sequence[float]],
    *,
    is_legal: bool,
) -> list[str]:
    """Return the faults of devices that hold more than their limits. `stage_bytes` are those of saved values and of gathered parameters."""
    faults: list[str] = []
    if in_flight is not None:
        limit = amounts("in_flight", in_flight, few.n_devices, "device", finite=False)
        faults += in_flight_faults(action_rows(few), copies_placed(few), limit)
    if memory_limit is not None:
        if isinstance(few, Schedule):
            raise InputError(
                "memory_limit needs a program",
                why="a schedule has no values and no messages",
                hint="verify(lower(schedule), memory_limit=...)",
            )
        limit = amounts("memory_limit", memory_limit, few.n_devices, "device", finite=False)
        faults += byte_faults(few, _sizes(few, *stage_bytes), limit) if is_legal else []
    return faults


def _legal(
    subject: Schedule | Program | PeriodicSchedule | PeriodicProgram,
    routes: Sequence[Route] | None,
    models: frozenset[MessageModel],
) -> list[str]:
    match subject:
        case Program():
            return program_faults(subject, Level.SLOTS, models)
        case PeriodicProgram():
            return periodic_program_faults(subject, models)
    all_routes = route_sequence(routes, subject.n_stages)
    faults = route_faults(all_routes, subject.n_stages)
    usable = () if faults else all_routes
    if isinstance(subject, PeriodicSchedule):
        return [*faults, *periodic_schedule_faults(subject, usable)]
    return [*faults, *schedule_faults(subject, usable)]


def _sizes(
    program: Program, saved_bytes: float | Sequence[float], unsharded_bytes: float | Sequence[float]
) -> dict[str, float]:
    """Return the bytes of each value by name. `@s.w` and `@s.o` count as all that the stage saves, `@s.r` and `@s.h` as nothing. `@s.p`
    are gathered parameters.
    """
    share = 1 / program.n_slices
    sizes = {route.value: route.nbytes * share for route in program.routes}
    gathered = amounts("unsharded_bytes", unsharded_bytes, program.n_stages, "stage")
    for stage, whole in enumerate(amounts("saved_bytes", saved_bytes, program.n_stages, "stage")):
        size = whole * share
        sizes |= {
            f"@{stage}": size,
            f"@{stage}.w": size,
            f"@{stage}.r": 0.0,
            f"@{stage}.o": size,
            f"@{stage}.h": 0.0,
            f"@{stage}.k": 0.0,
        }
        sizes[f"@{stage}.p"] = gathered[stage]
    return sizes


def verify_program(program: Program, level: Level = Level.SLOTS) -> None:
    """Raise VerifyError unless all promises up to `level` hold. A program that can run is legal at SLOTS. Linear."""
    if faults := program_faults(program, level):
        raise VerifyError("program" if level is Level.SLOTS else f"program at level {level.name}", faults)


@without_collection
def verify_written(written: WrittenProgram) -> None:
    """Raise VerifyError with all faults and their lines, unless the program can run. Linear."""
    if faults := program_faults(written.program, Level.SLOTS):
        raise VerifyError(written.source, [written.located(fault) for fault in faults])
