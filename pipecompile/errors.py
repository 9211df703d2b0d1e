"""Every exception that pipecompile raises on purpose: one root, a leaf per phase.

A message has up to four parts, each on its own line: what went wrong, where, why, and what to try.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "InfeasibleError",
    "InputError",
    "PartitionError",
    "PipecompileError",
    "PlanError",
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
    """The model cannot be recorded; `where` is the line of the user's file."""


class PartitionError(PipecompileError):
    """A partition problem is malformed or asks for the impossible."""


class InfeasibleError(PartitionError):
    """No cut fits; the message names the binding stage and the least limit that works."""


class PlanError(PipecompileError):
    """A plan file is damaged, of another version, or made for another graph."""


class ScheduleError(PipecompileError):
    """A schedule is unknown, cannot be built for these counts, or its text does not parse."""


class VerifyError(PipecompileError):
    """Something at one level is not legal. `faults` lists everything that was found wrong."""

    def __init__(self, subject: str, faults: Sequence[str]) -> None:
        self.subject, self.faults = subject, tuple(faults)
        count = f"{len(self.faults)} fault" + "s" * (len(self.faults) != 1)
        super().__init__("\n".join([f"{subject} is not legal: {count}", *(f"  - {fault}" for fault in self.faults)]))


class RunError(PipecompileError):
    """A stage failed while it ran, or a device moving a value (`stage` None). The original exception is the cause."""

    def __init__(
        self, what: str, *, stage: int | None, microbatch: int, where: str = "", why: str = "", hint: str = ""
    ) -> None:
        self.stage, self.microbatch = stage, microbatch
        super().__init__(what, where=where, why=why, hint=hint)
