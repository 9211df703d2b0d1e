"""Every exception that pipecompile raises on purpose: one root, a leaf per phase.

A message has up to four parts, each on its own line: what went wrong, where, why, and what to try.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

from pipecompile.codes import CODES

__all__ = [
    "InfeasibleError",
    "InputError",
    "PartitionError",
    "PipecompileError",
    "PlanError",
    "RecordingWarning",
    "RunError",
    "ScheduleError",
    "TraceError",
    "VerifyError",
]


class PipecompileError(Exception):
    """Root of all errors of this library. `what` is a sentence; the other parts are optional."""

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        self.what, self.where, self.why, self.hint = what, where, why, hint
        parts = (("where", where), ("why", why), ("try", hint))
        super().__init__("\n".join([what, *(f"  {label:<6} {text}" for label, text in parts if text)]))


class InputError(PipecompileError):
    """An argument or a mini-batch cannot be used: shapes, batch sizes, devices, counts."""


class TraceError(PipecompileError):
    """The model cannot be recorded; `where` is the line of the user's file.

    `code` is stable and has a section in docs/errors.md; what is not said is filled in from the table of codes.
    `file`, `line`, `function` and `source` (the text of the line) are the parts of `where`; empty and 0 when nobody knows.
    """

    def __init__(self, what: str = "", *, code: str = "PC199", where: str = "", why: str = "", hint: str = "") -> None:
        entry = CODES[code]
        self.code, self.page = code, entry.page
        self.file, self.line, self.function, self.source = _place(where)
        if self.source and not where.endswith(self.source):
            where = f"{where}:  {self.source}"
        super().__init__(
            what or f"cannot trace: {entry.what}", where=where, why=why or entry.why, hint=hint or entry.hint
        )
        self.args = (f"{code} {self}\n  {'more':<6} {entry.page}",)


_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+) in (?P<function>\S+?)(?::  (?P<source>.*))?$", re.DOTALL)


def _place(where: str) -> tuple[str, int, str, str]:
    """File, line, function and text of the line, of a place written as "file:line in function"."""
    found = _PLACE.match(where)
    if found is None:
        return "", 0, "", ""
    file, line = found["file"], int(found["line"])
    return file, line, found["function"], found["source"] or linecache.getline(file, line).strip()


class PartitionError(PipecompileError):
    """A partition problem is malformed or asks for the impossible."""


class InfeasibleError(PartitionError):
    """No cut fits; the message names the binding stage and the least limit that works."""


class PlanError(PipecompileError):
    """A plan file is damaged, of another version, or made for another graph."""


class ScheduleError(PipecompileError):
    """A schedule is unknown, cannot be built for these counts, or its text does not parse."""


class VerifyError(PipecompileError):
    """Something at one level is not legal. `faults` lists everything that was found wrong, `picture` shows where."""

    def __init__(self, subject: str, faults: Sequence[str], picture: str = "") -> None:
        self.subject, self.faults = subject, tuple(faults)
        count = f"{len(self.faults)} fault" + "s" * (len(self.faults) != 1)
        drawn = [f"  {line}" for line in picture.splitlines()]
        listed = [f"  - {fault}" for fault in self.faults]
        super().__init__("\n".join([f"{subject} is not legal: {count}", *listed, *drawn]))


class RunError(PipecompileError):
    """A stage failed while it ran, or a device moving a value (`stage` None). The original exception is the cause."""

    def __init__(
        self, what: str, *, stage: int | None, microbatch: int, where: str = "", why: str = "", hint: str = ""
    ) -> None:
        self.stage, self.microbatch = stage, microbatch
        super().__init__(what, where=where, why=why, hint=hint)


class PartitionWarning(UserWarning):
    """Time was up before the cut was proven to be the best; the message has the gap that is left."""


class RecordingWarning(UserWarning):
    """The model was recorded anew, or a mini-batch cut otherwise than asked for, because of how the model is written."""
