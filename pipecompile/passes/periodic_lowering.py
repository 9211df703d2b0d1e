"""The lowering of periodic schedules: few repetitions are lowered, and the rest follows by shifting micro-batches.

    lowered, n repetitions       ├─ prologue ─┤  ...  ├─ P ─┤├─ P, a step later ─┤  ...  ├─ epilogue ─┤

The order of communication follows the times at which messages are sent if every F, I and W takes the same time: n is large enough
for these to recur, and has one repetition more for each that a receive comes before its reader: the last repetitions have nothing to
receive so early. Where the two before those are not the same in a row, n is doubled. That the program with any number of repetitions
is legal is shown by `verifiers/periodic.py`. Linear in the actions of n repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import SHARDING, Action, Kind, Op, Program, Route, Schedule, Tie
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.instruction_rows import InstructionRow, InstructionTable
from pipecompile.ir.pass_manager import PassManager
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.periodic_program import PARTS, PeriodicProgram
from pipecompile.ir.program_arrays import OPS, Templates, listed
from pipecompile.ir.routes import Sums
from pipecompile.passes.array_lowering import BY_ARRAYS, action_arrays, free_rows, transfer_rows
from pipecompile.passes.array_meetings import meeting_rows
from pipecompile.passes.buffer_slots import assign_slots
from pipecompile.passes.checkpointing import Checkpoint, insert_recompute
from pipecompile.passes.lowering import lowering
from pipecompile.simulation.steady_state import simulate_periodic
from pipecompile.text.input_checks import check_kind, whole
from pipecompile.verifiers import verify
from pipecompile.verifiers.routes import route_sequence
from pipecompile.verifiers.tied_parameters import tie_sequence

__all__ = ["lower_periodic", "unroll"]

_MORE = 4
"""Repetitions that are lowered beside those until the times recur; twice as many as long as the last but these are not the same."""

_MOST_AHEAD = 1_000
"""Receives that may be posted early: as many repetitions are lowered beside the others."""


@without_collection
def lower_periodic(
    schedule: PeriodicSchedule,
    routes: Sequence[Route] | None = None,
    *,
    ties: Sequence[Tie] = (),
    checkpoint: Checkpoint = "never",
    receive_ahead: int = 0,
    sums: Sums = "eager",
) -> PeriodicProgram:
    """Return the program of a periodic schedule as prologue, period and epilogue, without lowering all micro-batches.

    The keywords are those of `lower`: `receive_ahead` is the number of receives that may be posted before their values are needed.
    `unroll` of the result is `lower(schedule.unrolled())`. Raise ScheduleError if it has no period, InputError if `schedule` is not
    a PeriodicSchedule, VerifyError if schedule, routes or ties are not legal.
    """
    check_kind(schedule, PeriodicSchedule, 'pc.build_periodic("1f1b", 8, 4096)')
    if isinstance(checkpoint, str) and checkpoint == "except_last":
        raise InputError("checkpoint='except_last' has no period", hint="'always', or a flag per stage")
    verify(schedule, routes=routes)
    if schedule.kinds & {*SHARDING}:
        raise InputError("UNSHARD, RESHARD and REDUCE_GRAD have no period", hint="lower(schedule.unrolled())")
    all_routes = route_sequence(routes, schedule.n_stages)
    manager = lowering(all_routes, tie_sequence(ties), checkpoint=checkpoint, receive_ahead=receive_ahead, sums=sums)
    by_arrays = None if ties or receive_ahead else _with_recompute(schedule, checkpoint)
    receive_ahead = whole("receive_ahead", receive_ahead, 0, _MOST_AHEAD)

    def lowered(count: int) -> Program:
        small = None if by_arrays is None else _lowered_by_arrays(by_arrays, all_routes, sums, count)
        return _lowered(schedule.unrolled(count), manager) if small is None else small

    settled = simulate_periodic(schedule, routes=all_routes).simulated
    program = _found(schedule, lowered, settled, receive_ahead)
    verify(program)
    return program


def _found(
    schedule: PeriodicSchedule, lowered: Callable[[int], Program], settled: int, receive_ahead: int
) -> PeriodicProgram:
    """Return the program in parts. `lowered` makes it for a number of repetitions, and `settled` is how many it takes for times to recur.

    Raise ScheduleError if it has no period.
    """
    count = first = settled + _MORE + receive_ahead
    while count < max(schedule.repetitions, first + 1):
        small = lowered(count)
        reach = max(receive_ahead, _reach(schedule, small, settled))
        if count < settled + _MORE + reach:
            count = settled + _MORE + reach
        elif (program := _periodic(schedule, small, count, 1 + reach)) is not None:
            return program
        else:
            count *= 2
    raise ScheduleError(
        f"the program of {schedule.repetitions} repetitions has no period",
        why="its repetitions are lowered differently",
        hint="lower(schedule.unrolled())",
    )


def unroll(program: PeriodicProgram, repetitions: int | None = None) -> Program:
    """Return the program with slots, as `lower` makes it, with the number of repetitions of this one or another.

    Raise InputError if `program` is not a PeriodicProgram.
    """
    check_kind(program, PeriodicProgram, "pc.lower_periodic(schedule)")
    return assign_slots(program.unrolled(repetitions))


def _lowered(subject: object, manager: PassManager) -> Program:
    """Return the program that the passes make of a schedule, without slots."""
    for each in manager.passes:
        subject = subject if each.name == "slots" else each.run(subject)
    assert isinstance(subject, Program)
    return subject


def _with_recompute(schedule: PeriodicSchedule, checkpoint: Checkpoint) -> PeriodicSchedule | None:
    """Return the schedule with the R of `checkpoint`; None if it has actions that are not lowered by arrays."""
    kinds = schedule.kinds
    if isinstance(checkpoint, str) and checkpoint == "never":
        return schedule if kinds <= BY_ARRAYS else None
    if not kinds <= BY_ARRAYS - {Kind.RECOMPUTE, Kind.OFFLOAD, Kind.RELOAD}:
        return None
    counts = schedule.n_stages, schedule.n_microbatches, schedule.placement
    before, period, after = (
        insert_recompute(Schedule(*counts, getattr(schedule, part)), checkpoint).rows for part in PARTS
    )
    return replace(schedule, prologue=before, period=period, epilogue=after)


def _lowered_by_arrays(schedule: PeriodicSchedule, routes: tuple[Route, ...], sums: Sums, count: int) -> Program | None:
    """Return the program that the passes make of `count` repetitions; None if messages cannot be ordered by arrays."""
    if any(len(route.consumers) > 1 and route.gradient for route in routes):
        from pipecompile.passes.gradient_sums import with_sums

        routes = with_sums(schedule.unrolled(count), routes, sums)
    ordered = meeting_rows(transfer_rows(action_arrays(schedule, routes, count)), schedule, count)
    if ordered is None:
        return None
    arrays = free_rows(ordered)
    rows = tuple(map(arrays.row, range(len(arrays.rows))))
    return Program(arrays.n_stages, arrays.n_microbatches, arrays.placement, routes, rows)  # type: ignore[arg-type]


def _periodic(schedule: PeriodicSchedule, small: Program, count: int, after: int) -> PeriodicProgram | None:
    """Return the program cut into parts; None if the last two repetitions but `after` of a row are not the same."""
    runs, rows = [], _array_rows(small)
    for row, places, before, own in zip(rows, _places(rows), schedule.prologue, schedule.period, strict=True):
        each = _passes(own)
        first = _passes(before) + each * (count - after - 3)
        run = _run(row, places[[first, first + each, first + 2 * each]].tolist(), schedule.step)
        if run is None:
            return None
        runs.append(run)
    repeated = min(each for _, _, each in runs)
    repetitions = schedule.repetitions - count + repeated
    if repetitions < 1:
        return None
    step = schedule.step
    parts = [
        (row[:start], row[start : start + length], row[start + repeated * length :].later(-step * repeated))
        for row, (start, length, _) in zip(rows, runs, strict=True)
    ]
    prologue, period, epilogue = (tuple(part[index] for part in parts) for index in range(3))
    counts = small.n_stages, small.placement, small.routes
    return PeriodicProgram(*counts, prologue, period, epilogue, repetitions, step, small.ties)


def _passes(row: Sequence[Action]) -> int:
    """Return the number of actions that `checkpoint` does not add."""
    return sum(action.kind is not Kind.RECOMPUTE for action in row)


def _array_rows(program: Program) -> list[InstructionRow]:
    table = InstructionTable()
    return [table.row(row) for row in program.rows]


def _places(rows: Sequence[InstructionRow]) -> list[NDArray[np.int64]]:
    """Return where the actions are that `checkpoint` does not add, in each of the rows of one table."""
    actions = (one.action for one in rows[0].table.templates)
    is_pass = np.array([a is not None and a.kind is not Kind.RECOMPUTE for a in actions])
    return [np.flatnonzero(is_pass[row.numbers]) for row in rows]


def _reach(schedule: PeriodicSchedule, small: Program, settled: int) -> int:
    """Return how many repetitions a receive comes before its reader at most, in the repetitions from number `settled` on."""
    rows, reach, m = _array_rows(small), 0, small.n_microbatches
    templates = Templates(rows[0].table.templates)
    for row, places, before, period in zip(rows, _places(rows), schedule.prologue, schedule.period, strict=True):
        each = _passes(period)
        own = places[_passes(before) + each * settled :]
        numbers, microbatches = row.numbers[own[0] :], row.microbatches[own[0] :]
        index, read = listed(templates.reads, numbers)
        values, first = np.unique(read * m + microbatches[index], return_index=True)
        received = np.flatnonzero(templates.op[numbers] == OPS[Op.RECV])
        wanted = templates.message_class[numbers[received]] * m + microbatches[received]
        readers = index[first[np.searchsorted(values, wanted)]]
        until, since = (np.searchsorted(own - own[0], those) for those in (readers, received))
        reach = max(reach, int((until - since).max(initial=0)) // each)
    return reach


def _run(row: InstructionRow, bounds: Sequence[int], step: int) -> tuple[int, int, int] | None:
    """Return the start of the first repetition in a lowered row, the length of a period, and the number of repetitions.

    `bounds` are those of two repetitions, one after the other. They have to be the same: their run is as long as instructions agree with
    those one period later.
    """
    begin, end, last = bounds
    length = end - begin
    numbers, microbatches = row.numbers, row.microbatches
    is_same = (numbers[length:] == numbers[:-length]) & (microbatches[length:] == microbatches[:-length] + step)
    if last - end != length or not is_same[begin:end].all():
        return None
    others = np.flatnonzero(~is_same)
    start = int(max(others[others < begin], default=-1)) + 1
    stop = int(min(others[others >= end], default=len(is_same))) + length
    return start, length, (stop - start) // length
