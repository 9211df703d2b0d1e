"""The schedule of `pipecompile schedule NAME`: of the catalogue, of a search, or of a file. It needs no model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipecompile.cli.compile_options import schedule_of
from pipecompile.errors import InputError

if TYPE_CHECKING:
    from pipecompile.ir import Schedule

__all__ = ["plain_schedule"]


def plain_schedule(
    name: str,
    stages: int,
    microbatches: int,
    devices: int | None,
    slices: int | None,
    checkpoint: str | tuple[bool, ...],
) -> Schedule:
    """Return a schedule that needs no model. Raise InputError for `--checkpoint auto`, which needs memory sizes in bytes, and for
    `--slices` of a schedule that is read or searched.
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
    if built == "auto":
        built = pipecompile.auto_schedule(stages, microbatches, n_devices=devices)
    elif isinstance(built, str):
        built = pipecompile.build_schedule(built, stages, microbatches, n_devices=devices, n_slices=slices)
    return insert_recompute(built, checkpoint)
