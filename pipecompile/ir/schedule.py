"""A schedule: per device the ordered list of what it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipecompile.errors import ScheduleError
from pipecompile.ir.action import Action
from pipecompile.ir.notebook_html import html_of

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per device, the ordered list of its actions. `placement[s]` is the device of stage s."""

    n_stages: int
    n_microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Action, ...], ...]
    name: str = field(default="custom", compare=False)

    @property
    def n_devices(self) -> int:
        return len(self.rows)

    def to_csv(self) -> str:
        """One row per device, one cell per action; the compute-only form of torch.distributed.pipelining."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    __str__ = to_csv

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_csv())

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """Read a file as `from_csv` does; it is named after the file. Raises ScheduleError, also when the file is missing."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError("the schedule cannot be read", where=str(path), why=str(error)) from None
        return cls.from_csv(text, Path(path).stem)

    @classmethod
    def from_rows(cls, rows: Iterable[Iterable[Action | str]], name: str = "custom") -> Schedule:
        """The schedule that these rows are; actions may be written: `from_rows([["0F0", "0B0"], ["1F0", "1B0"]])`.

        Counts and placement are read off. Raises ScheduleError when a stage is on two devices, or on none.
        """
        read = tuple(tuple(Action.parse(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
        placement = _placement(read)
        n_microbatches = max(action.microbatch for row in read for action in row) + 1
        return cls(len(placement), n_microbatches, placement, read, name)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read `to_csv`'s form, or a file of torch.distributed.pipelining, with its communication or without.

        Empty cells (idle ticks) and communication are skipped: the lowering makes its own. Raises ScheduleError naming
        row and column.
        """
        from pipecompile.ir.schedule_csv import read_rows

        return cls.from_rows(read_rows(text), name)


def _placement(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    home: dict[int, int] = {}
    for device, row in enumerate(rows):
        for action in row:
            if home.setdefault(action.stage, device) != device:
                raise ScheduleError(
                    f"stage {action.stage} is on device {home[action.stage]} and on device {device}",
                    where=f"row {device}, action {action}",
                    hint="keep all actions of a stage in one row",
                )
    if not home:
        raise ScheduleError("there is no action", hint="one row per device, actions such as 0F0,0F1,0B0,0B1")
    missing = next((stage for stage in range(len(home)) if stage not in home), None)
    if missing is not None:
        raise ScheduleError(f"no row holds an action of stage {missing}", why=f"stages 0 to {max(home)} are expected")
    return tuple(home[stage] for stage in range(len(home)))
