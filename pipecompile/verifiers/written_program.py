"""Verifier of a program that a user wrote: its faults, each with the lines of the file that it is about."""

from __future__ import annotations

from pipecompile.errors import VerifyError
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.verifiers.program import Level, program_faults

__all__ = ["verify_written"]


@without_collection
def verify_written(written: WrittenProgram) -> None:
    """Raise VerifyError with all faults and their lines, unless the program can run. Linear."""
    if faults := program_faults(written.program, Level.SLOTS):
        raise VerifyError(written.source, [written.located(fault) for fault in faults])
