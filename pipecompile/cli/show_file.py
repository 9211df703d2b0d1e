"""`pipecompile show FILE`: a file of an earlier `--out` or `dump` as a table or a picture in text.

plan.json        stages with their nodes, times, bytes and transfers
schedule.csv     the grid in unit time
program.txt      the instructions of each device, counted, and whether the program is legal
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pipecompile.cli.command_report import CommandReport, schedule_report
from pipecompile.cli.exit_codes import faults_of_file
from pipecompile.errors import InputError, VerifyError
from pipecompile.text.units import counted

__all__ = ["show_report"]

_SUFFIXES = (".json", ".csv", ".txt")


def show_report(path: Path) -> CommandReport:
    """Report the file. Raise InputError, PlanError or ScheduleError for what cannot be read."""
    from pipecompile.ir.plan import Plan

    if path.suffix in _SUFFIXES and not path.exists():
        hint = "pipecompile plan MODEL --input SHAPE --out out, which writes out/plan.json"
        raise InputError(f"there is no file {path}", hint=hint)
    if path.is_dir():
        names = sorted(
            each.name for each in path.iterdir() if each.name in ("plan.json", "schedule.csv", "program.txt")
        )
        raise InputError(f"{path} is a directory", hint=", ".join(str(path / name) for name in names) or "a file")
    if path.suffix == ".json":
        return _plan_report(Plan.load(path))
    if path.suffix == ".txt":
        return _program_report(path)
    if path.suffix == ".csv":
        import pipecompile

        schedule = pipecompile.Schedule.load(path)
        with faults_of_file(path):
            return schedule_report(schedule, pipecompile.simulate(schedule), None)
    raise InputError(f"{path} is not a plan, schedule or program", hint="plan.json, schedule.csv or program.txt")


def _plan_report(plan: object) -> CommandReport:
    import msgspec

    from pipecompile.ir.plan import Plan
    from pipecompile.show.table import StageTable

    assert isinstance(plan, Plan)
    return CommandReport({"plan": msgspec.to_builtins(plan)}, (StageTable(plan, None),))


def _program_report(path: Path) -> CommandReport:
    """Report how many instructions of each kind a device has. Raise VerifyError for a program that is not legal."""
    import pipecompile
    from pipecompile.ir.program_text import load_program

    program = load_program(path)
    with faults_of_file(path):
        try:
            pipecompile.verify(program)
        except VerifyError as error:
            raise VerifyError(f"program in {path}", error.faults) from None
    counts = [Counter(instruction.op.value for instruction in row) for row in program.rows]
    units = counted(program.n_microbatches, "micro-batch" if program.n_slices == 1 else "slice")
    lines = [f"{counted(program.n_stages, 'stage')} on {counted(program.n_devices, 'device')}, {units}; legal"]
    for device, count in enumerate(counts):
        lines.append(f"device {device}: " + ", ".join(f"{number} {op}" for op, number in sorted(count.items())))
    return CommandReport({"devices": [dict(count) for count in counts]}, ("\n".join(lines),))
