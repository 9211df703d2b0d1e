"""Verifiers of periodic schedules and programs: a few repetitions are verified, and the others follow by induction.

    repetition      0     1     2    ...   n - 1
    row 0    ├──────┤┈┈┈┈┈┤┈┈┈┈┈┤┈┈┈┈┈┤┈┈┈┈┈┤─────┤      after repetition 1, and after 2: the least that all devices have to do before
    row 1    ├────┤┈┈┈┈┈┤┈┈┈┈┈┤┈┈┈┈┈┤┈┈┈┈┈┤───────┤      both are over is the same, one period later

Let Q(n) be the unrolled subject with n repetitions. Where Q(n) and Q(n + 1) are legal and the following holds, so is Q(N) for all N > n:

1. Every condition of the kind "each micro-batch exactly once" (actions, sends, receives, writes, frees) equates two sums
   A + P (1 - y^n) / (1 - y) + y^n E, where y shifts micro-batches by a step. If it holds for n and n + 1, it holds for all.
2. In a row, what the period reads or frees is written earlier: by so many periods as the micro-batches differ, counted in positions.
3. Messages between two devices are received in the order of sending, counted in the same way, and no further apart than n repetitions.
4. Let D be the least state, as a position per row, in which all prologues and one repetition are over, closed under waits, and D' the
   same with two. Both lie within the repetitions, and D' is D one period later. From D, D' can be reached, since Q(n) has no
   deadlock; its waits are at constant distances, so the same steps lead from D' on, as often as there are repetitions. What follows
   is the end of Q(n).

Where this cannot be shown for few repetitions, all are verified.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from pipecompile.ir import SHARDING, Instruction, Kind, Op, Program, Route, Schedule
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.verifiers.array_induction import is_legal_program, is_legal_schedule
from pipecompile.verifiers.deadlock import Step
from pipecompile.verifiers.message_models import ALL_MODELS, MessageModel
from pipecompile.verifiers.pairing import waiting_rows
from pipecompile.verifiers.periodic_rows import are_ordered, distance, period_arrays
from pipecompile.verifiers.program import Level, program_faults
from pipecompile.verifiers.schedule import schedule_faults, schedule_needs, schedule_waits

__all__ = ["periodic_program_faults", "periodic_schedule_faults"]

Subject = TypeVar("Subject")

_FEW = 4
"""Repetitions that are tried first; twice as many as long as they do not show that the others follow."""


def periodic_schedule_faults(schedule: PeriodicSchedule, routes: Sequence[Route]) -> list[str]:
    """Return the faults of a periodic schedule: those of few repetitions, or of all where the others do not follow."""
    if faults := _shape_faults(schedule):
        return faults

    def recurs(unrolled: Schedule, count: int) -> bool:
        waits = schedule_waits(unrolled, routes)
        cuts = [
            [len(before) + index * len(period) for index in (1, 2, count)]
            for before, period in zip(schedule.prologue, schedule.period, strict=True)
        ]
        return _recurring(waits, cuts)

    def faults_of(unrolled: Schedule) -> list[str]:
        return schedule_faults(unrolled, routes)

    is_sharded = bool(schedule.kinds & {*SHARDING})
    if is_sharded or _mixes_recomputed_and_offloaded(schedule) or not _is_ordered_schedule(schedule, routes):
        return faults_of(schedule.unrolled())
    if is_legal_schedule(schedule, routes, _FEW):
        return []
    return _by_induction(schedule.repetitions, _FEW, schedule.unrolled, faults_of, recurs)


def periodic_program_faults(program: PeriodicProgram, models: frozenset[MessageModel] = ALL_MODELS) -> list[str]:
    """Return the faults of a periodic program at LIVENESS: those of few repetitions, or of all where the others do not follow."""
    if faults := _shape_faults(program):
        return faults
    meet = MessageModel.RENDEZVOUS in models

    def recurs(unrolled: Program, count: int) -> bool:
        waits, exchange_of = waiting_rows(unrolled, meet=meet)
        cuts = []
        for before, period, own in zip(program.prologue, program.period, exchange_of, strict=True):
            first, each = _exchanges(before), _exchanges(period)
            ends = [first + index * each for index in (1, 2, count)]
            cuts.append([sum(exchange < end for exchange in own) for end in ends])
        return _recurring(waits, cuts)

    def faults_of(unrolled: Program) -> list[str]:
        return program_faults(unrolled, Level.LIVENESS, models)

    period = period_arrays(program)
    apart = distance(period, program.step)
    if apart is None or not are_ordered(period, program.step):
        return faults_of(program.unrolled())
    few = max(_FEW, apart + 2)
    if is_legal_program(program, few):
        return []
    return _by_induction(program.repetitions, few, program.unrolled, faults_of, recurs)


def _by_induction(
    repetitions: int,
    few: int,
    unrolled: Callable[[int], Subject],
    faults_of: Callable[[Subject], list[str]],
    recurs: Callable[[Subject, int], bool],
) -> list[str]:
    """Return the faults of so few repetitions that the others follow from them, and of one more; of all if there are none such."""
    count = few
    while count + 1 < repetitions:
        subject = unrolled(count)
        if faults := faults_of(subject):
            return faults
        if recurs(subject, count):
            return faults_of(unrolled(count + 1))
        count *= 2
    return faults_of(unrolled(repetitions))


def _shape_faults(subject: PeriodicSchedule | PeriodicProgram) -> list[str]:
    if subject.repetitions < 1 or subject.step < 1:
        return [f"{subject.repetitions} repetitions, each {subject.step} later: at least one of each is needed"]
    counts = {len(subject.prologue), len(subject.period), len(subject.epilogue)}
    return [f"prologue, period and epilogue have {sorted(counts)} rows"] if len(counts) > 1 else []


def _recurring(waits: Sequence[Sequence[Step]], cuts: Sequence[Sequence[int]]) -> bool:
    """Return whether what is done when two repetitions are over is what is done after one, a period later, and within the last.

    `cuts` has, per row, the numbers of steps until one repetition, two, and all are over.
    """
    provider = {provides: (row, i) for row, steps in enumerate(waits) for i, (_, provides) in enumerate(steps)}
    one, two = (_closed(waits, [cut[index] for cut in cuts], provider) for index in (0, 1))
    return all(
        after - before == cut[1] - cut[0] and after <= cut[2] for before, after, cut in zip(one, two, cuts, strict=True)
    )


def _closed(
    waits: Sequence[Sequence[Step]], start: Sequence[int], provider: dict[object, tuple[int, int]]
) -> list[int]:
    """Return the steps of each row that are over at least, if those of `start` are: with all that they wait for. Linear."""
    reached, done = list(start), [0] * len(waits)
    rows = list(range(len(waits)))
    while rows:
        row = rows.pop()
        while done[row] < reached[row]:
            for need in waits[row][done[row]][0]:
                other, index = provider.get(need, (row, -1))
                if index >= reached[other]:
                    reached[other] = index + 1
                    rows.append(other)
            done[row] += 1
    return reached


def _exchanges(row: Sequence[Instruction]) -> int:
    """Return the number of exchanges of a row that `waiting_rows` counts: messages, also with the host, and tied parameters."""
    return sum(i.op in (Op.BROADCAST, Op.REDUCE) or (i.op in (Op.SEND, Op.RECV) and i.peer is not None) for i in row)


def _mixes_recomputed_and_offloaded(schedule: PeriodicSchedule) -> bool:
    """Return whether a stage has R and OFFLOAD: then no count says that no cell has both."""
    kinds = defaultdict[int, set[Kind]](set)
    for row in (*schedule.prologue, *schedule.period, *schedule.epilogue):
        for action in row:
            kinds[action.stage].add(action.kind)
    return any(own >= {Kind.RECOMPUTE, Kind.OFFLOAD} for own in kinds.values())


def _is_ordered_schedule(schedule: PeriodicSchedule, routes: Sequence[Route]) -> bool:
    """Return whether each action of a period comes after all that it needs of its own device, in whichever repetition that is."""
    step, kinds = schedule.step, {a.kind for row in schedule.period for a in row}
    needs = schedule_needs(schedule.n_stages, routes, kinds)
    for row in schedule.period:
        places = {(a.stage, a.kind, a.microbatch % step): (place, a.microbatch) for place, a in enumerate(row)}
        if len(places) < len(row) or any(a.stage not in range(schedule.n_stages) for a in row):
            return False
        for place, action in enumerate(row):
            for stage, kind in needs[action.stage].get(action.kind, ()):
                need = places.get((stage, kind, action.microbatch % step))
                if need is not None and not _is_later(place, action.microbatch, *need, len(row), step):
                    return False
    return True


def _is_later(place: int, microbatch: int, first: int, of: int, length: int, step: int) -> bool:
    """Return whether an item of a period on this micro-batch comes after another, at `first`, in the repetition in which that is on it.

    Repetition j has micro-batch `microbatch` + j step of the item and `of` + j step of the other.
    """
    return place + length * ((of - microbatch) // step) > first
