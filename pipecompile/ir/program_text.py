"""The parser of programs: `parse_program(str(program)) == program`. The grammar of an instruction is in `ir`.

    program: 2 stages on devices 0 1, 4 micro-batches
    direction: devices 1 0, micro-batches 1 3
    route x: host -> 0, 64 bytes
    route v0: 0 -> 1 host, 4096 bytes, gradient
    route v1: 0 -> 1 2 3, 4096 bytes, gradient, sums 3+1
    tie embedding: 0 1, 1024 bytes
    device 0
      BROADCAST embedding
      RECV x#0[0] from host
      0F0 x#0[0] -> v0#0[0] @0#0[0]
      SEND v0#0[0] to 1

One item per line, in this order. Indentation and empty lines have no meaning. The parser accepts illegal programs;
`verify` reports their faults. Counts that no text of this length can have are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import HOST, NO_SLICE, Action, Instruction, Op, Operand, Program, Route, Tie, Value
from pipecompile.ir.directions import Direction
from pipecompile.text.input_checks import checked_count, without_mark
from pipecompile.text.shown_value import type_text
from pipecompile.text.text_file import load_text, named_file

__all__ = [
    "PROGRAM_FILE",
    "line_numbers",
    "load_program",
    "parse_instruction",
    "parse_program",
    "parse_route",
    "parse_tie",
]

PROGRAM_FILE = "the program.txt that pipe.dump(directory) writes"

_NUMBER = "[0-9]{1,9}"
_HEADER = re.compile(
    rf"program: ({_NUMBER}) stages on devices((?: {_NUMBER})*), ({_NUMBER}) (?:micro-batches|slices, ({_NUMBER}) per micro-batch)"
)
_DIRECTION = re.compile(rf"direction: devices((?: {_NUMBER})+), micro-batches((?: {_NUMBER})+)")
_ROUTE = re.compile(
    rf"route (\S+): (host|{_NUMBER}) ->((?: (?:host|{_NUMBER}))*), (\S+) bytes(, gradient)?(?:, sums((?: {_NUMBER}(?:\+{_NUMBER})+)+))?"
)
_TIE = re.compile(rf"tie (\S+):((?: {_NUMBER})*), (\S+) bytes")
_OPERAND = re.compile(rf"([^\s#'\[\]]+)(?:'(host|{_NUMBER}))?#({_NUMBER})(?:\[({_NUMBER})\])?")
_SEND, _RECV = (re.compile(rf"{op} (\S+) {word} (host|{_NUMBER})") for op, word in (("SEND", "to"), ("RECV", "from")))
_FREE = re.compile(r"FREE (\S+)")
_COLLECTIVE = re.compile(r"(BROADCAST|REDUCE) (\S+)")
_COMPUTE = re.compile(r"(\S+)((?: \S+)*) ->((?: \S+)*)")


def load_program(path: Path) -> Program:
    """Return the program in a file. Raise ScheduleError that names the line that cannot be read, also if the file is missing."""
    text = load_text(path, "program", ScheduleError, PROGRAM_FILE)
    with named_file(path):
        return parse_program(text)


def parse_program(text: str) -> Program:
    """Return the program whose `str` is `text`. Raise ScheduleError naming the line that cannot be read, InputError for no text."""
    items = _Items()
    for number, line in _lines(text):
        try:
            items.add(line)
        except ScheduleError as error:
            raise ScheduleError(error.what, where=f"line {number}", why=error.why, hint=error.hint) from None
    return items.program()


@dataclass(slots=True)
class _Items:
    """The items of the lines so far, in the order in which they have to come."""

    header: re.Match[str] | None = None
    directions: list[Direction] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    ties: list[Tie] = field(default_factory=list)
    rows: list[list[Instruction]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add the item of a line. Raise ScheduleError."""
        if self.header is None:
            self.header = _match(_HEADER, line, "program: 2 stages on devices 0 1, 4 micro-batches")
        elif line.startswith("direction:") and not (self.rows or self.ties or self.routes):
            self.directions.append(_direction(line))
        elif line.startswith("route ") and not (self.rows or self.ties):
            self.routes.append(parse_route(line))
        elif line.startswith("tie ") and not self.rows:
            self.ties.append(parse_tie(line))
        elif line == f"device {len(self.rows)}":
            self.rows.append([])
        elif self.rows and not line.startswith(("device ", "direction:", "route ", "tie ")):
            self.rows[-1].append(parse_instruction(line))
        else:
            raise ScheduleError(f"{line!r} is out of place", why=f"the next device must be 'device {len(self.rows)}'")

    def program(self) -> Program:
        """Return the program of all items. Raise ScheduleError if there is none."""
        if self.header is None:
            raise ScheduleError("the text holds no program", why="its first line must be 'program: ...'")
        stages, parts, placement, n_slices = _counts(self.header, sum(map(len, self.rows)))
        moved = tuple(self.routes), tuple(map(tuple, self.rows)), tuple(self.ties)
        return Program(stages, parts, placement, *moved, n_slices, tuple(self.directions))


def _counts(header: re.Match[str], n_items: int) -> tuple[int, int, tuple[int, ...], int]:
    """Return the numbers of stages and of micro-batches, the placement, and the number of slices per micro-batch. Raise
    ScheduleError for a count above the items.
    """
    placement = tuple(map(int, header[2].split()))
    n_stages = checked_count(int(header[1]), max(n_items, len(placement)), "stages")
    count = checked_count(int(header[3]), n_items, "micro-batches")
    return n_stages, count, placement, checked_count(int(header[4] or 1), max(count, 1), "slices per micro-batch")


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the number and the text of every line that is not blank, without a byte-order mark. Raise InputError for no text."""
    if not isinstance(text, str):
        raise InputError(
            f"{type_text(text)} is not the text of a program", hint="parse_program(Path(path).read_text())"
        )
    lines = enumerate(without_mark(text).split("\n"), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]


def line_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers, from 1, of the lines that are not blank: those of the lines of `str(parse_program(text))`."""
    return tuple(number for number, _ in _lines(text))


def _direction(line: str) -> Direction:
    match = _match(_DIRECTION, line, "direction: devices 1 0, micro-batches 1 3")
    placement, microbatches = (tuple(map(int, part.split())) for part in match.group(1, 2))
    return Direction(placement, microbatches)


def parse_route(line: str) -> Route:
    """Return the route whose `str` is `line`. Raise ScheduleError if the line cannot be read."""
    match = _match(_ROUTE, line, "route v0: 0 -> 1 host, 4096 bytes, gradient")
    consumers = tuple(map(_end, match[3].split()))
    sums = tuple(tuple(map(int, group.split("+"))) for group in (match[6] or "").split())
    return Route(match[1], _end(match[2]), consumers, _bytes(match[4], line), match[5] is not None, sums)


def parse_tie(line: str) -> Tie:
    """Return the tie whose `str` is `line`. Raise ScheduleError if the line cannot be read."""
    match = _match(_TIE, line, "tie embedding: 0 3, 4096 bytes")
    return Tie(match[1], tuple(map(int, match[2].split())), _bytes(match[3], line))


def parse_instruction(line: str) -> Instruction:
    """Return the instruction whose `str` is `line`. Raise ScheduleError if the line cannot be read."""
    if line.startswith("SEND "):
        match = _match(_SEND, line, "SEND v0#0 to 1")
        return Instruction(Op.SEND, reads=(_operand(match[1]),), peer=_end(match[2]))
    if line.startswith("RECV "):
        match = _match(_RECV, line, "RECV v0#0 from 1")
        return Instruction(Op.RECV, writes=(_operand(match[1]),), peer=_end(match[2]))
    if line.startswith("FREE "):
        return Instruction(Op.FREE, reads=(_operand(_match(_FREE, line, "FREE v0#0")[1]),))
    if line.startswith(("BROADCAST ", "REDUCE ")):
        match = _match(_COLLECTIVE, line, "REDUCE embedding")
        return Instruction(Op(match[1]), tie=match[2])
    overlaps = line.startswith("OVERLAP ")
    match = _match(_COMPUTE, line.removeprefix("OVERLAP ").lstrip(), "1F0 v0#0 -> v1#0 @1#0")
    reads, writes = (tuple(map(_operand, side.split())) for side in match.group(2, 3))
    action = Action.parse(match[1])
    if action.slice != NO_SLICE:
        raise ScheduleError(
            f"{action} is on a slice",
            why="a program numbers the slices of all micro-batches from 0",
            hint=str(replace(action, slice=NO_SLICE)),
        )
    return Instruction(Op.COMPUTE, reads, writes, action, overlaps=overlaps)


def _operand(text: str) -> Operand:
    match = _match(_OPERAND, text, "v0#0, v0'1#0, or with a slot v0#0[1]")
    consumer = None if match[2] is None else _end(match[2])
    return Operand(Value(match[1], int(match[3]), consumer), None if match[4] is None else int(match[4]))


def _bytes(text: str, line: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ScheduleError(f"{text!r} is not a number of bytes", why=f"read in {line!r}") from None


def _end(text: str) -> int:
    return HOST if text == "host" else int(text)


def _match(pattern: re.Pattern[str], text: str, example: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} cannot be read", why=f"expected something like: {example}")
    return match
