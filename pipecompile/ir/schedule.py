"""A schedule: per device, the ordered list of its actions.

    0F0,0F1,0B0,0B1         device 0
    1F0,1B0,1F1,1B1         device 1       text form: CSV, also that of torch.distributed.pipelining
    (1F2;0B1)OVERLAP_F_B                   a forward and a backward that run at the same time (`overlap.py`)
    0F0.0,0F0.1,0B0.1,0B0.0                slices of a micro-batch along its sequence (`slices.py`)

The verifier is `verifiers/schedule.py`; the builders are in `schedules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir.action import NO_MICROBATCH, NO_SLICE, SHARDING, Action, Kind
from pipecompile.ir.certificate import Certificate
from pipecompile.ir.directions import Direction, found_directions
from pipecompile.ir.overlap import Pair, in_order, is_pair, parse_cell, written_cells
from pipecompile.ir.slices import checked_slices
from pipecompile.ir.views import html_of
from pipecompile.text.input_checks import checked_count, file_path
from pipecompile.text.shown_value import shown
from pipecompile.text.text_file import load_text, named_file, save_text

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per device, the ordered list of its actions. `placement[s]` is the device of stage s; `directions` are further copies of all
    stages, for some of the micro-batches (`directions.py`).

    `certificate` has the lower bound that the search of `auto_schedule` proved; None for other schedules. It holds for these rows
    only. `name` and `certificate` do not count for equality. `overlaps` has the neighbours of a row that run at the same time: a
    forward with a backward.

    `n_microbatches` counts whole micro-batches. If each is divided along its sequence into `n_slices`, there is an action per stage,
    kind, micro-batch and slice, and `n_units` counts the slices of all micro-batches.
    """

    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)
    certificate: Certificate | None = field(default=None, compare=False)
    overlaps: frozenset[Pair] = field(default=frozenset(), repr=False)
    n_slices: int = field(default=1, repr=False)
    directions: tuple[Direction, ...] = field(default=(), repr=False)

    @property
    def n_devices(self) -> int:
        """Number of pipeline devices."""
        return len(self.rows)

    @property
    def n_units(self) -> int:
        """Return the number of forwards of a stage: of micro-batches, or of the slices of all micro-batches."""
        return self.n_microbatches * self.n_slices

    @property
    def is_split(self) -> bool:
        """Return whether any backward is divided into I and W."""
        return any(action.kind is Kind.INPUT_GRAD for row in self.rows for action in row)

    @property
    def gap(self) -> float | None:
        """Return the share of the step that a better schedule could save at most; None without a certificate."""
        return None if self.certificate is None else self.certificate.gap

    def __repr__(self) -> str:
        counts = f"n_stages={self.n_stages}, n_microbatches={self.n_microbatches}, n_devices={self.n_devices}"
        slices = "" if self.n_slices == 1 else f", n_slices={self.n_slices}"
        gap = "" if self.gap is None else f", gap={self.gap:.1%}"
        return f"Schedule({self.name!r}, {counts}{slices}{gap})"

    def to_csv(self) -> str:
        """Return one row per device, one cell per action: the compute-only form of torch.distributed.pipelining. The row of a
        device without actions is a comma. That form has no slices, and torch would read `0F0.1` as `0F0`.
        """
        return "".join((",".join(written_cells(row, self.overlaps)) or ",") + "\n" for row in self.rows)

    __str__ = to_csv

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def save(self, path: str | Path) -> None:
        """Write `to_csv` to a file. Raise InputError if it cannot be written."""
        save_text(path, self.to_csv())

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a file as `from_csv` does and name the schedule after the file. Raise ScheduleError, also if the file is
        missing.
        """
        source = file_path("path", path)
        text = load_text(source, "schedule", ScheduleError, f"write one with schedule.save({str(source)!r})")
        with named_file(source):
            return cls.from_csv(text, source.stem)

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Cell]], name: str = "custom") -> Schedule:
        """Return the schedule with these rows of actions or of their texts: `from_rows([["0F0", "0B0"], ["1F0",
        "1B0"]])`. A text `(0F1;1B0)OVERLAP_F_B`, or a pair of actions, is a forward and a backward at the same time.

        Placement, directions and numbers of stages, micro-batches and slices follow from the rows. Raise ScheduleError if a stage is
        on two devices for one micro-batch, or on none, if there are fewer actions than micro-batches, or if some actions have a slice
        and others have none.
        """
        return cls._of_cells(_cells(rows), name, "row {0}".format)

    @classmethod
    def _of_cells(cls, cells: Sequence[Sequence[Sequence[Action]]], name: str, place: Callable[[int], str]) -> Schedule:
        """Return the schedule with these cells; `place` is how a message names a row."""
        actions = tuple(tuple(action for parts in row for action in parts) for row in cells)
        overlaps = frozenset((parts[0], parts[1]) for row in cells for parts in row if is_pair(parts))
        if all(action.kind in SHARDING for row in actions for action in row):
            raise ScheduleError("there is no action", hint="write one row per device, such as 0F0,0F1,0B0,0B1")
        placement, directions = _placement(actions, place)
        most = max(action.microbatch for row in actions for action in row) + 1
        n_microbatches = checked_count(most, sum(map(len, actions)), "micro-batches")
        n_slices = checked_slices(actions, n_microbatches)
        counts = len(placement), n_microbatches, placement
        return cls(*counts, actions, name, overlaps=overlaps, n_slices=n_slices, directions=directions)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read the form of `to_csv`, or a file of torch.distributed.pipelining with or without communication.

        Skip empty cells (idle ticks), messages and waits, which the lowering inserts again. Raise ScheduleError naming
        row and column of each cell that cannot be read.
        """
        from pipecompile.ir.schedule_csv import read_rows, row_place

        return cls._of_cells([[in_order(cell) for cell in row] for row in read_rows(text)], name, row_place)


Cell = Action | str | Sequence[Action]
"""An action, its text, or the actions of a cell of OVERLAP_F_B."""


def _parts(cell: Cell) -> Sequence[Action]:
    """Return the actions of a cell: one, or those that overlap."""
    if isinstance(cell, Action):
        return (cell,)
    actions = parse_cell(cell) if isinstance(cell, str) else tuple(cell)
    if not all(isinstance(action, Action) for action in actions):
        raise TypeError
    return in_order(actions)


def _cells(rows: Iterable[Iterable[Cell]]) -> list[list[Sequence[Action]]]:
    """Return the actions of each cell. Raise InputError if `rows` is not a sequence of rows of cells."""
    try:
        lists = [row if isinstance(row, str) else list(row) for row in rows]
        if any(isinstance(row, str) for row in lists):
            raise TypeError
    except TypeError:
        raise InputError(f"rows={shown(rows)} are not rows of actions", hint=_ROWS) from None
    return [[_cell(cell, row, column) for column, cell in enumerate(cells)] for row, cells in enumerate(lists)]


_ROWS = 'Schedule.from_rows([["0F0", "0B0"], ["1F0", "1B0"]])'


def _cell(cell: Cell, row: int, column: int) -> Sequence[Action]:
    """Return the actions of a cell. Raise InputError if it is not a cell, ScheduleError if its text is not one, both with the place."""
    try:
        return _parts(cell)
    except ScheduleError as error:
        where = f"row {row}, cell {column + 1}"
        raise ScheduleError(error.what, where=where, why=error.why, hint=error.hint) from None
    except TypeError:
        where = f"row {row}, cell {column + 1}"
        raise InputError(f"{shown(cell)} is not an action", where=where, hint=_ROWS) from None


def _placement(
    rows: Sequence[Sequence[Action]], place: Callable[[int], str]
) -> tuple[tuple[int, ...], tuple[Direction, ...]]:
    """Return the device of each stage for the first micro-batch, and the directions of the others."""
    first = min((a.microbatch for row in rows for a in row if a.microbatch != NO_MICROBATCH), default=NO_MICROBATCH)
    places = [(action.stage, device) for device, row in enumerate(rows) for action in row if action.microbatch == first]
    device_of = dict(reversed(places))
    moved = None
    for device, row in enumerate(rows):
        for action in row:
            if device_of.setdefault(action.stage, device) != device and moved is None:
                moved = device, action
    directions = () if moved is None else found_directions(rows, max(device_of) + 1)
    if directions is None or (directions and any(a.slice != NO_SLICE for row in rows for a in row)):
        assert moved is not None
        device, action = moved
        raise ScheduleError(
            f"stage {action.stage} is on device {device_of[action.stage]} and on device {device}",
            where=f"{place(device)}, action {action}",
            hint="keep all actions of a stage in one row, or all of a stage and micro-batch, of whole micro-batches",
        )
    missing = next((stage for stage in range(len(device_of)) if stage not in device_of), None)
    if missing is not None:
        raise ScheduleError(
            f"no row holds an action of stage {missing}", why=f"stages 0 to {max(device_of)} are expected"
        )
    return tuple(device_of[stage] for stage in range(len(device_of))), directions
