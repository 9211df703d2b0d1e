"""`offload=True` beside the keywords that it excludes."""

from __future__ import annotations

from typing import Any

from pipecompile.errors import InputError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.text.shown_value import shown

__all__ = ["check_offload"]


def check_offload(schedule: Any, checkpoint: Any, across_batch: str | None) -> None:
    """Raise InputError for a schedule, a recomputation or a batch with which nothing can be offloaded by a keyword."""
    what, why, hint = "", "", ""
    if isinstance(schedule, WrittenProgram):
        what, why, hint = "a Program", "the program has an OFFLOAD for each cell that the host holds", "no offload"
    elif schedule == "auto":
        what, why = 'schedule="auto"', "its search fits the schedule into the memory without copies to the host"
        hint = 'the name of a schedule, such as schedule="1f1b"'
    elif checkpoint != "never" and checkpoint != (False,) * len(checkpoint):
        what, why = f"checkpoint={shown(checkpoint)}", "a micro-batch of a stage is recomputed or offloaded, not both"
        hint = "one of the two"
    elif across_batch == "exact":
        what, why = 'across_batch="exact"', "such a step runs two programs, one up to the loss and one from there on"
        hint = "one of the two"
    if what:
        raise InputError(f"offload=True is given together with {what}", why=why, hint=hint)
