"""The schedule of `pipecompile schedule NAME`: of the catalogue, of a search, or of a file. It needs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipecompile.cli.compile_options import schedule_of
from pipecompile.errors import InputError

if TYPE_CHECKING:
    from pipecompile.ir import Schedule

__all__ = ["plain_schedule"]

_STAGES, _MICROBATCHES = 4, 8
"""The counts of a schedule that is built, where none are given."""


def plain_schedule(
    name: str,
    stages: int | None,
    microbatches: int | None,
    devices: int | None,
    slices: int | None,
    checkpoint: str | tuple[bool, ...],
) -> Schedule:
    """Return a schedule that needs no model. Raise InputError for `--checkpoint auto`, which needs memory sizes in bytes, and for
    `--slices` of a schedule that is read or searched, and for counts that a file does not have.
    """
    import pipecompile
    from pipecompile.ir.written_program import WrittenProgram
    from pipecompile.passes.checkpointing import insert_recompute

    if checkpoint == "auto":
        raise InputError(
            "--checkpoint auto needs a model",
            why="the memory of its stages decides",
            hint="pipecompile simulate MODEL --checkpoint auto",
        )
    built = schedule_of(name)
    built = built.plain if isinstance(built, WrittenProgram) else built  # without a model, the order of its actions
    if slices is not None and (built == "auto" or not isinstance(built, str)):
        why = "files have their own slices, and searches are of whole micro-batches"
        raise InputError(
            f"--slices is given together with {name}", why=why, hint="pipecompile schedule seq1f1b --slices 4"
        )
    counts = _STAGES if stages is None else stages, _MICROBATCHES if microbatches is None else microbatches
    if built == "auto":
        built = pipecompile.auto_schedule(*counts, n_devices=devices)
    elif isinstance(built, str):
        built = pipecompile.build_schedule(built, *counts, n_devices=devices, n_slices=slices)
    else:
        _check_counts(name, built, stages=stages, microbatches=microbatches, devices=devices)
    return insert_recompute(built, checkpoint)


def _check_counts(name: str, schedule: Schedule, **counts: int | None) -> None:
    """Raise InputError for a count that differs from the schedule in the file."""
    own = {"stages": schedule.n_stages, "microbatches": schedule.n_microbatches, "devices": schedule.n_devices}
    for option, count in counts.items():
        if count not in (None, own[option]):
            what = f"--{option} {count} is not that of {name}, which has {own[option]}"
            raise InputError(what, why="a file has its own counts", hint=f"no --{option}")
