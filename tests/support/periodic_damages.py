"""Random damages to periodic schedules and programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from pipecompile.ir.periodic import PeriodicSchedule, shifted
from pipecompile.ir.periodic_program import PARTS, PeriodicProgram, later

Row = list[Any]
Subject = TypeVar("Subject", PeriodicSchedule, PeriodicProgram)
HOW = ("drop", "repeat", "swap", "move", "other micro-batch", "other repetition")


def damaged(rng: Random, subject: Subject, how: str) -> Subject:
    """One item of a part is gone, there twice, elsewhere in the row, or on another micro-batch; or done repetitions later everywhere."""
    move: Callable[..., Sequence[Any]] = shifted if isinstance(subject, PeriodicSchedule) else later
    parts = {name: [list(row) for row in getattr(subject, name)] for name in PARTS}
    rows = [row for name in (["period"] if how == "other repetition" else PARTS) for row in parts[name] if len(row) > 1]
    row = rng.choice(rows)
    index = rng.randrange(len(row) - 1)
    match how:
        case "drop":
            del row[index]
        case "repeat":
            row.insert(rng.randrange(len(row)), row[index])
        case "swap":
            row[index : index + 2] = row[index : index + 2][::-1]
        case "move":
            row.insert(rng.randrange(len(row)), row.pop(index))
        case "other micro-batch":
            row[index : index + 1] = move(row[index : index + 1], rng.choice([-1, 1, subject.step]))
        case "other repetition":
            _later(parts, parts["period"].index(row), index, rng.choice([1, 2, 5]), subject.step, move)
    return replace(subject, **{name: tuple(map(tuple, rows)) for name, rows in parts.items()})


def _later(
    parts: dict[str, list[Row]], device: int, index: int, count: int, step: int, move: Callable[..., Any]
) -> None:
    """Let the period do an item on micro-batches of `count` repetitions later: the prologue does the first, the epilogue fewer."""
    row = parts["period"][device]
    first = [move([row[index]], step * number)[0] for number in range(count)]
    row[index : index + 1] = move([row[index]], step * count)
    parts["prologue"][device] += first
    parts["epilogue"][device] = [item for item in parts["epilogue"][device] if item not in first]
