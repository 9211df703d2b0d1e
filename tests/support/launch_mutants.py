"""Damages to the launches of a program: a wait, an event or a FREE that is missing or in another place.

    compute 0   0F0 ■ ── 0F1 ── ...         wait removed        SEND does not wait for ■
    copy 0►1        └─► SEND ── SEND        wait a launch late  the second SEND waits for ■, the first does not
                                            event removed       nobody waits for ■
                                            event too soon      ■ is recorded before 0F0, after what came before it

Each comes with the launches that have to be late for it to show: what was waited for, and who reads what is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipecompile.errors import VerifyError
from pipecompile.ir import Instruction, Op, Program
from pipecompile.ir.execution_order import merged
from pipecompile.runtime.stream_events import Lane, Launch, Place
from pipecompile.verifiers import verify

__all__ = ["Launches", "Mutant", "free_earlier", "is_legal", "mutants", "waits_of", "with_row"]

Launches = tuple[tuple[Launch, ...], ...]
Waits = dict[Place, tuple[Place, ...]]


@dataclass(frozen=True)
class Mutant:
    """`at` are the launches that wait for less, `missed` what they should have waited for."""

    kind: str
    launches: Launches
    at: tuple[Place, ...]
    missed: Place

    def is_implied(self, program: Program) -> bool:
        """Does each launch still follow what it should have waited for, by its stream and by the waits of others?"""
        after: dict[Place, set[Place]] = {}
        latest: dict[Lane, Place] = {}
        for d, i in merged(program):
            launch = self.launches[d][i]
            if launch.lane is None:
                continue
            before = [*launch.waits, *([latest[launch.lane]] if launch.lane in latest else [])]
            after[d, i] = set(before).union(*(after[place] for place in before))
            latest[launch.lane] = d, i
        return all(self.missed in after[place] for place in self.at)

    def late(self, program: Program) -> set[Place]:
        return {self.missed} | {reader for place in (*self.at, self.missed) for reader in _readers(program, place)}


def mutants(program: Program, planned: Launches) -> Iterator[Mutant]:
    """One at a time, all of them."""
    before, after = _neighbours(program, planned)
    waits: Waits = {(d, i): launch.waits for d, row in enumerate(planned) for i, launch in enumerate(row)}
    for place, missed in waits_of(planned):
        less = waits | {place: tuple(w for w in waits[place] if w != missed)}
        yield Mutant("wait removed", _with(planned, less), (place,), missed)
        if place in after:
            later = less | {after[place]: (*less[after[place]], missed)}
            yield Mutant("wait a launch late", _with(planned, later), (place,), missed)
    for missed in dict.fromkeys(missed for _, missed in waits_of(planned)):
        at = tuple(place for place, some in waits.items() if missed in some)
        none = waits | {place: tuple(w for w in waits[place] if w != missed) for place in at}
        yield Mutant("event removed", _with(planned, none), at, missed)
        if missed in before:
            sooner = none | {place: (*none[place], before[missed]) for place in at if place != before[missed]}
            yield Mutant("event a launch too soon", _with(planned, sooner), at, missed)


def waits_of(planned: Launches) -> list[tuple[Place, Place]]:
    """Every wait: who waits, and for what."""
    return [((d, i), w) for d, row in enumerate(planned) for i, launch in enumerate(row) for w in launch.waits]


def free_earlier(device: int, index: int) -> Callable[[Program], Program]:
    """Move a FREE, the first from `index` on, before the last instruction that reads what it frees."""

    def damage(program: Program) -> Program:
        row = list(program.rows[device])
        free = next((i for i in range(index, len(row)) if row[i].op is Op.FREE), None)
        if free is None:
            return program
        (operand,) = row[free].reads
        readers = [i for i in range(free) if operand in row[i].reads]
        if not readers:
            return program
        row.insert(readers[-1], row.pop(free))
        return with_row(program, device, tuple(row))

    return damage


def with_row(program: Program, device: int, row: tuple[Instruction, ...]) -> Program:
    return replace(program, rows=(*program.rows[:device], row, *program.rows[device + 1 :]))


def is_legal(program: Program) -> bool:
    try:
        verify(program)
    except VerifyError:
        return False
    return True


def _neighbours(program: Program, planned: Launches) -> tuple[dict[Place, Place], dict[Place, Place]]:
    """The launch before each one on its stream, and the one after it."""
    before: dict[Place, Place] = {}
    latest: dict[Lane, Place] = {}
    for d, i in merged(program):
        lane = planned[d][i].lane
        if lane is None:
            continue
        if lane in latest:
            before[d, i] = latest[lane]
        latest[lane] = d, i
    return before, {first: second for second, first in before.items()}


def _with(planned: Launches, waits: Waits) -> Launches:
    awaited = {place for some in waits.values() for place in some}
    return tuple(
        tuple(replace(launch, waits=waits[d, i], is_awaited=(d, i) in awaited) for i, launch in enumerate(row))
        for d, row in enumerate(planned)
    )


def _readers(program: Program, place: Place) -> set[Place]:
    """Who computes with what is given back there."""
    d, i = place
    row = program.rows[d]
    freed = row[i].reads if row[i].op is Op.FREE else ()
    return {(d, j) for j in range(i) if row[j].op is Op.COMPUTE and not set(freed).isdisjoint(row[j].reads)}
