"""A periodic schedule: per device a prologue, a period that is repeated with later micro-batches, and an epilogue.

    0F0,(0F1;0B0)x7+1,0B7        device 0: (0F1;0B0) 7 times, each time with micro-batches 1 later: 0F1 0B0 0F2 0B1 ... 0F7 0B6
    (1F0;1B0)x7+1,1F7,1B7        device 1

Its size does not depend on the number of micro-batches. `Schedule.from_csv` reads the same text, and unrolls it. The repeated part is
the repetend of Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", 2024.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipecompile.errors import ScheduleError
from pipecompile.ir.action import SHARDING, Action, Kind
from pipecompile.ir.directions import check_one_direction
from pipecompile.ir.schedule import Schedule
from pipecompile.ir.schedule_csv import Repeated, csv_lines, parse_repeated, row_place
from pipecompile.ir.slices import check_whole, first_slice
from pipecompile.text.input_checks import json_text, whole
from pipecompile.text.shown_value import shown

__all__ = ["MOST_REPETITIONS", "PeriodicSchedule", "check_unrolled", "shifted"]

MOST_REPETITIONS = 10**15
"""Counts up to which sums and products of a few are exact as floats."""

_MOST_UNROLLED = 100_000_000
"""Actions or instructions of what is unrolled."""

Rows = tuple[tuple[Action, ...], ...]


def check_unrolled(period: Sequence[Sequence[object]], count: int) -> None:
    """Raise ScheduleError if memory cannot hold `count` repetitions of a period."""
    if sum(map(len, period)) * count > _MOST_UNROLLED:
        why = f"each has {sum(map(len, period)):,} items, and at most {_MOST_UNROLLED:,} are unrolled"
        raise ScheduleError(f"{shown(count)} repetitions are too many to unroll", why=why, hint="repetitions=4")


def shifted(row: Sequence[Action], microbatches: int) -> tuple[Action, ...]:
    """Return the actions with numbers of micro-batches higher by `microbatches`."""
    return tuple([action.later(microbatches) for action in row])


@dataclass(frozen=True, slots=True)
class PeriodicSchedule:
    """Per device `prologue`, then `period`, `repetitions` times, then `epilogue`.

    Each repetition has micro-batches that are `step` later than the one before. The micro-batches of the epilogue are those of no
    repetition: it comes `step * repetitions` later. `name` does not count for equality.
    """

    n_stages: int
    placement: tuple[int, ...]
    prologue: Rows
    period: Rows
    epilogue: Rows
    repetitions: int
    step: int
    name: str = field(default="periodic", compare=False)

    @property
    def n_devices(self) -> int:
        """Number of pipeline devices."""
        return len(self.period)

    @property
    def n_microbatches(self) -> int:
        rows = (*self.prologue, *self.epilogue)
        rest = {a.microbatch for row in rows for a in row if a.stage == 0 and a.kind not in SHARDING}
        return len(rest) + self.step * self.repetitions

    @property
    def kinds(self) -> set[Kind]:
        """The kinds of all its actions."""
        parts = self.prologue, self.period, self.epilogue
        return {action.kind for rows in parts for row in rows for action in row}

    def __repr__(self) -> str:
        counts = f"n_stages={self.n_stages}, n_microbatches={self.n_microbatches}, n_devices={self.n_devices}"
        return f"PeriodicSchedule({self.name!r}, {counts}, {self.repetitions} times {self.step})"

    def repeated(self, repetitions: int) -> PeriodicSchedule:
        """Return the schedule with another number of repetitions."""
        return replace(self, repetitions=whole("repetitions", repetitions, 1, MOST_REPETITIONS))

    def unrolled(self, repetitions: int | None = None) -> Schedule:
        """Return the plain schedule, with the number of repetitions of this one or another."""
        count = self.repetitions if repetitions is None else whole("repetitions", repetitions, 1)
        check_unrolled(self.period, count)
        rows = tuple(tuple(self._row(device, count)) for device in range(self.n_devices))
        n_microbatches = self.n_microbatches + self.step * (count - self.repetitions)
        return Schedule(self.n_stages, n_microbatches, self.placement, rows, self.name)

    def _row(self, device: int, count: int) -> Iterator[Action]:
        yield from self.prologue[device]
        for index in range(count):
            yield from shifted(self.period[device], self.step * index)
        yield from shifted(self.epilogue[device], self.step * count)

    def to_csv(self) -> str:
        """Return a row per device: the cells of the prologue, the period as one cell, the cells of the epilogue."""
        lines = []
        for prologue, period, epilogue in zip(self.prologue, self.period, self.epilogue, strict=True):
            cell = f"({';'.join(map(str, period))})x{self.repetitions}+{self.step}"
            end = shifted(epilogue, self.step * self.repetitions)
            lines.append(",".join((*map(str, prologue), cell, *map(str, end))) + "\n")
        return "".join(lines)

    __str__ = to_csv

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> PeriodicSchedule:
        """Read the form of `to_csv`. Raise ScheduleError naming the row that has no period, or another one than the row before."""
        parts = [_parts(line, number) for number, line in enumerate(csv_lines(text))]
        counts = {(period.count, period.step) for _, period, _ in parts}
        if len(counts) != 1:
            raise ScheduleError("the rows are repeated differently", why="every row needs the same xCOUNT+STEP")
        ((count, step),) = counts
        after = tuple(shifted(row, -step * count) for _, _, row in parts)
        _check_epilogue(after, step * count)
        rows = ((*before, *each.actions, *row) for (before, each, _), row in zip(parts, after, strict=True))
        unrolled = Schedule.from_rows(rows)
        check_whole(
            unrolled, "a periodic schedule has whole micro-batches", hint="Schedule.from_csv, which unrolls the rows"
        )
        check_one_direction(
            unrolled, "a periodic schedule has one placement", "Schedule.from_csv, which unrolls the rows"
        )
        placement = unrolled.placement
        before, period = tuple(row for row, _, _ in parts), tuple(each.actions for _, each, _ in parts)
        return cls(len(placement), placement, before, period, after, count, step, name)

    def to_json(self) -> str:
        """Return the schedule as JSON: counts, and per device the texts of the three parts."""
        parts = {name: [" ".join(map(str, row)) for row in getattr(self, name)] for name in _PARTS}
        counts = {"n_stages": self.n_stages, "placement": self.placement, "repetitions": self.repetitions}
        return json.dumps({"name": self.name, **counts, "step": self.step, **parts}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> PeriodicSchedule:
        """Read the form of `to_json`. Raise ScheduleError if it is another."""
        try:
            data: dict[str, Any] = json.loads(json_text(text))
            prologue, period, epilogue = (
                tuple(tuple(map(Action.parse, row.split())) for row in data[name]) for name in _PARTS
            )
            n_stages, repetitions, step = (_count(name, data[name]) for name in ("n_stages", "repetitions", "step"))
            placement = tuple(_count("placement", device) for device in data["placement"])
            name = str(data["name"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ScheduleError("the text is not a periodic schedule", why=f"{type(error).__name__}: {error}") from None
        if (sliced := first_slice((*prologue, *period, *epilogue))) is not None:
            raise ScheduleError(f"{sliced} is on a slice", why="a periodic schedule has whole micro-batches")
        return cls(n_stages, placement, prologue, period, epilogue, repetitions, step, name)


_PARTS = ("prologue", "period", "epilogue")


def _count(name: str, value: Any) -> int:
    """Return a whole number. Raise TypeError for another value: int() would make 2 of 2.7."""
    if type(value) is not int:
        raise TypeError(f"{name} is {shown(value)}, not a whole number")
    return value


def _check_epilogue(epilogue: Rows, later: int) -> None:
    """Raise ScheduleError for an action on a micro-batch of the repetitions: with more of them, others would be left out."""
    for number, row in enumerate(epilogue):
        for action in row:
            if action.microbatch < 0 and action.kind not in SHARDING:
                raise ScheduleError(
                    f"{action.later(later)} after the period is on a micro-batch of the repetitions",
                    where=row_place(number),
                    why=f"an epilogue has micro-batches from {later} on, so that any number of repetitions can come before it",
                    hint="Schedule.from_csv, which reads any rows",
                )


def _parts(line: str, row: int) -> tuple[tuple[Action, ...], Repeated, tuple[Action, ...]]:
    cells: list[Repeated | Action] = []
    for column, cell in enumerate(line.split(",")):
        try:
            cells += [parse_repeated(cell.strip()) or Action.parse(cell.strip())] if cell.strip() else []
        except ScheduleError as error:
            where = f"{row_place(row)}, cell {column + 1}"
            raise ScheduleError(error.what, where=where, why=error.why, hint=error.hint) from None
    periods = [(index, cell) for index, cell in enumerate(cells) if isinstance(cell, Repeated)]
    if len(periods) != 1:
        raise ScheduleError(
            f"the row has {len(periods)} periods, expected 1", where=row_place(row), why="as in (0F1;0B0)x7+1"
        )
    ((index, period),) = periods
    before, after = (tuple(a for a in part if isinstance(a, Action)) for part in (cells[:index], cells[index + 1 :]))
    return before, period, after
