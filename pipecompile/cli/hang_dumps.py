"""`pipecompile hang DUMP... --program out/program.txt`: at which SEND or RECV the ranks of a program hang.

nccl_trace_rank_0 ...     what torch's flight recorder has written on each rank, or a folder of such files
program.txt               of `pipe.dump("out")`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipecompile.cli.command_report import CommandReport
from pipecompile.cli.exit_codes import faults_of_file
from pipecompile.errors import InputError

if TYPE_CHECKING:
    from pipecompile.ir import Program

__all__ = ["dumps_report"]

NO_CAUSE = 1
"""Exit code if no rank is certain to be the cause."""


def dumps_report(dumps: Sequence[Path], program: Path, ranks: str | None) -> CommandReport:
    """Report where ranks hang. Raise InputError, ScheduleError or VerifyError for files that cannot be used."""
    from pipecompile.distributed.hangs.flight_dump import read_flight_dumps
    from pipecompile.distributed.hangs.hang_report import hang_report

    legal = _program(program)
    report = hang_report(legal, read_flight_dumps(dumps), _numbers(ranks))
    return CommandReport(report.to_dict(), (str(report),), 0 if report.causes else NO_CAUSE)


def _program(path: Path) -> Program:
    import pipecompile
    from pipecompile.ir.program_text import load_program

    program = load_program(path)
    with faults_of_file(path):
        pipecompile.verify(program)
    return program


def _numbers(ranks: str | None) -> tuple[int, ...] | None:
    """Return the ranks of `--ranks 4,5,6`. Raise InputError."""
    if ranks is None:
        return None
    parts = ranks.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise InputError(f"--ranks {ranks!r} is not a list of ranks", hint="--ranks 0,1,2,3")
    return tuple(map(int, parts))
