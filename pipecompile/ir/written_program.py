"""A program that a user wrote, in the place of a schedule: what `compile(schedule=...)` makes of a Program or of a program.txt.

    program.txt ──load──┐
                        ├──► WrittenProgram    a Schedule of the program's actions, the program, and the numbers of its lines
    Program ────of──────┘

Where a Schedule is wanted, this is the order of the actions. The lowering is left out: what is written is what runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipecompile.errors import ScheduleError
from pipecompile.ir.action import NO_SLICE, Action, Kind
from pipecompile.ir.directions import directions_fault
from pipecompile.ir.instruction_rows import InstructionRow
from pipecompile.ir.periodic import MOST_REPETITIONS
from pipecompile.ir.periodic_program import PeriodicProgram
from pipecompile.ir.program import Instruction, Op, Operand, Program, Value
from pipecompile.ir.routes import TARGET, Route, Tie
from pipecompile.ir.schedule import Schedule
from pipecompile.text.input_checks import FEW, file_path
from pipecompile.text.shown_value import shown
from pipecompile.text.text_file import load_text, named_file

__all__ = ["WrittenProgram", "type_faults"]


@dataclass(frozen=True, slots=True)
class WrittenProgram(Schedule):
    """A user's program. `source` names its file, or is "the program". `numbers[i]` is the number, from 1, of the line in that file
    that has line i of `str(program)`.
    """

    program: Program = field(kw_only=True)
    source: str = field(kw_only=True, compare=False)
    numbers: tuple[int, ...] = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, program: Program, source: str = "the program", numbers: Sequence[int] = ()) -> WrittenProgram:
        """Return a program as what `compile` takes for a schedule. Raise ScheduleError if it is not made of the types of the IR."""
        if faults := list(type_faults(program)):
            hint = "start from pipe.program, and change it by dataclasses.replace"
            raise ScheduleError(f"{source} is not made of the types of pipecompile.ir", where=faults[0], hint=hint)
        if program.n_slices != 1:
            hint = 'a schedule of slices, such as pc.build_schedule("seq1f1b", n_stages, n_microbatches)'
            raise ScheduleError(
                f"{source} is of slices of sequences", why="such a program is made from a schedule", hint=hint
            )
        rows = tuple(tuple(i.action for i in row if i.action is not None) for row in program.rows)
        name = Path(source).stem if numbers else "written"
        lines = tuple(numbers) or tuple(range(1, len(str(program).splitlines()) + 1))
        counts = program.n_stages, program.n_microbatches, program.placement
        schedule = cls(*counts, rows, name, overlaps=program.overlaps, program=program, source=source, numbers=lines)
        return replace(schedule, directions=program.directions)

    @classmethod
    def load(cls, path: str | Path) -> WrittenProgram:
        """Read the text form of a program. Raise ScheduleError naming the line that cannot be read, also if the file is missing."""
        from pipecompile.ir.program_text import PROGRAM_FILE, line_numbers, parse_program

        source = file_path("path", path)
        text = load_text(source, "program", ScheduleError, PROGRAM_FILE)
        with named_file(source):
            program = parse_program(text)
        return cls.of(program, str(source), line_numbers(text))

    @property
    def plain(self) -> Schedule:
        """The order of the actions alone."""
        counts = self.n_stages, self.n_microbatches, self.placement
        return Schedule(*counts, self.rows, self.name, overlaps=self.overlaps, directions=self.directions)

    @property
    def has_target(self) -> bool:
        """Whether the program is of a step with a target."""
        return any(route.value == TARGET for route in self.program.routes)

    def line_of(self, device: int, step: int) -> int:
        """Return the number of the line with an instruction of a device."""
        before = sum(len(row) + 1 for row in self.program.rows[:device])
        items = len(self.program.directions) + len(self.program.routes) + len(self.program.ties)
        return self.numbers[1 + items + before + 1 + step]

    def located(self, fault: str) -> str:
        """Return a fault with the numbers of the lines that it is about in front, where it names any."""
        lines = sorted(dict.fromkeys(self._lines_of(fault)))
        more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        shown = ", ".join(map(str, lines[:_SHOWN]))
        return f"line{'s' * (len(lines) > 1)} {shown}{more}: {fault}" if lines else fault

    def _lines_of(self, fault: str) -> Iterator[int]:
        """Yield the line of the step that the fault names; else those of its route or tie; else those of its actions and values."""
        items: list[Route | Tie] = [*self.program.routes, *self.program.ties]
        before = 1 + len(self.program.directions)
        if step := _STEP.search(fault) or _WRITTEN.match(fault):
            yield self.line_of(int(step[1]), int(step[2]))
        elif of_items := [i for i, item in enumerate(items, before) if fault.startswith((f"{item}:", _head(item)))]:
            yield from (self.numbers[index] for index in of_items)
        else:
            named = partial(_is_named, names=_cells(fault) or set(_ACTION.findall(fault)) or set(_VALUE.findall(fault)))
            rows = enumerate(self.program.rows)
            yield from (self.line_of(d, i) for d, row in rows for i, one in enumerate(row) if named(one))


_SHOWN = 4
"""Number of lines that a fault names."""

_STEP = re.compile(r"device (\d+), step (\d+)")
_WRITTEN = re.compile(r"device (\d+): \S+, written at step (\d+)")
_ACTION = re.compile(r"(?<![\w.#'])\d+(?:(?:[FRBIW]|OFFLOAD|RELOAD)\d+|UNSHARD|RESHARD|REDUCE_GRAD)(?!\w)")
_CELLS = re.compile(r"stage (\d+) .* for micro-batch(?:es)? (\d+(?:, \d+)*)")
_VALUE = re.compile(r"[^\s#'\[\](),]+(?:'\w+)?#\d+")


def _head(item: Route | Tie) -> str:
    """Return the beginning of the text of a route or a tie, up to its name."""
    return f"route {item.value}:" if isinstance(item, Route) else f"tie {item.name}:"


def _cells(fault: str) -> set[str]:
    """Return the actions that the cells of a fault may have, if the fault is about all actions of a stage and micro-batch."""
    match = _CELLS.match(fault)
    numbers = match[2].split(", ") if match else ()
    return {f"{match[1]}{kind.value}{number}" for number in numbers for kind in Kind} if match else set()


def _is_named(instruction: Instruction, names: set[str]) -> bool:
    """Return whether `names` has the action, or the value that is sent or received."""
    if instruction.action is not None:
        return str(instruction.action) in names
    operands = (*instruction.reads, *instruction.writes) if instruction.op in (Op.SEND, Op.RECV) else ()
    return any(str(operand.value) in names for operand in operands)


# -- types ----------------------------------------------------------------------------------------------------------


def type_faults(subject: Program | Schedule | PeriodicProgram) -> Iterator[str]:
    """Yield the parts of a Program or a Schedule that are not data of the IR: Python code can make them, and no verifier can look at them."""
    is_periodic = isinstance(subject, PeriodicProgram)
    slices = ("n_slices",) if isinstance(subject, Schedule | Program) else ()
    for name in ("n_stages", "repetitions", "step") if is_periodic else ("n_stages", "n_microbatches", *slices):
        if not is_number(getattr(subject, name)):
            yield f"{name} is {shown(getattr(subject, name))}, not a whole number"
    if not (isinstance(subject.placement, tuple) and all(map(is_number, subject.placement))):
        yield f"placement is {shown(subject.placement)}, not a tuple of whole numbers"
    for name, of in () if isinstance(subject, Schedule) else (("routes", Route), ("ties", Tie)):
        if not _are(getattr(subject, name), of):
            yield f"{name} is {shown(getattr(subject, name))}, not a tuple of {of.__name__}"
    if isinstance(subject, Schedule) and (fault := overlaps_fault(subject.overlaps)):
        yield fault
    if isinstance(subject, Schedule | Program) and (fault := directions_fault(subject.directions)):
        yield fault
    parts = ("prologue", "period", "epilogue") if is_periodic else ("rows",)
    faults = [
        fault
        for part in parts
        for fault in _row_type_faults(part, getattr(subject, part), is_schedule=isinstance(subject, Schedule))
    ]
    yield from faults or _too_many(subject, sum(len(row) for part in parts for row in getattr(subject, part)))


def _too_many(subject: Program | Schedule | PeriodicProgram, n_items: int) -> Iterator[str]:
    """Yield counts that a program of `n_items` actions cannot have, so that no later check loops for a number alone."""
    for name in ("n_stages", "step" if isinstance(subject, PeriodicProgram) else "n_microbatches"):
        count = getattr(subject, name)
        if is_number(count) and count > max(n_items, FEW):
            yield f"{name} is {count:,}, and there are {n_items:,} steps in all"


def is_number(value: object) -> bool:
    """Return whether a value is a whole number, and none that no program can have."""
    return isinstance(value, int) and type(value) is not bool and -1 <= value <= MOST_REPETITIONS


def _row_type_faults(name: str, rows: object, *, is_schedule: bool) -> Iterator[str]:
    if not (isinstance(rows, tuple) and all(isinstance(row, tuple | InstructionRow) for row in rows)):
        yield f"{name} is {shown(rows)}, not a tuple with a tuple per device"
        return
    check = _action_fault if is_schedule else _instruction_fault
    part = "" if name == "rows" else f"{name}, "
    for device, row in enumerate(rows):
        items = row.distinct() if isinstance(row, InstructionRow) else enumerate(row)
        faults = ((index, check(one)) for index, one in items)
        yield from (f"{part}device {device}, step {index}: {fault}" for index, fault in faults if fault)


def overlaps_fault(overlaps: Any) -> str:
    """Return what is wrong with the overlaps of a schedule as data; empty if nothing is."""
    is_set = isinstance(overlaps, frozenset)
    is_right = is_set and all(_are(p, Action) and len(p) == 2 and not any(map(_action_fault, p)) for p in overlaps)
    return "" if is_right else f"overlaps is {shown(overlaps)}, not a frozenset of pairs of Action"


def _are(values: object, kind: type) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, kind) for value in values)


def _action_fault(action: Any) -> str:
    is_action = isinstance(action, Action) and isinstance(action.kind, Kind)
    is_action = is_action and is_number(action.stage) and is_number(action.microbatch)
    is_action = is_action and is_number(action.slice)
    return "" if is_action else f"{shown(action)} is not an Action"


def _instruction_fault(one: Any) -> str:
    if not isinstance(one, Instruction):
        return f"{shown(one)} is not an Instruction"
    if not isinstance(one.op, Op):
        return f"op is {shown(one.op)}, not an Op"
    if one.action is not None and (fault := _action_fault(one.action)):
        return fault
    if one.action is not None and one.action.slice != NO_SLICE:
        return f"{one.action} is on a slice, and a program numbers the slices of all micro-batches"
    if not isinstance(one.overlaps, bool):
        return f"overlaps is {shown(one.overlaps)}, not True or False"
    if not (isinstance(one.peer, int | None) and isinstance(one.tie, str | None)):
        return f"peer {shown(one.peer)} is not a device, or tie {shown(one.tie)} is not a name"
    if not (_are(one.reads, Operand) and _are(one.writes, Operand)):
        return "reads and writes are not tuples of Operand"
    strange = (o for o in (*one.reads, *one.writes) if not _is_operand(o))
    return next((f"{shown(operand)} is not an operand" for operand in strange), "")


def _is_operand(operand: Operand) -> bool:
    value = operand.value
    if not isinstance(value, Value) or not isinstance(operand.slot, int | None):
        return False
    return isinstance(value.name, str) and isinstance(value.microbatch, int) and isinstance(value.consumer, int | None)
