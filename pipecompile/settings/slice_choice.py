"""A schedule of slices beside the keywords that it needs and those that it excludes."""

from __future__ import annotations

from typing import Any

from pipecompile.errors import ScheduleError
from pipecompile.ir import BACKWARDS, Kind, Schedule
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["EXCLUDED", "check_slices"]

EXCLUDED: dict[str, str] = {
    "offload": "keys and values of a slice are read by later slices while they would be on the host",
    "reshard_after_forward": "no prediction of memory counts both",
    "across_batch": "the samples of a mini-batch meet behind all micro-batches, and slices have losses of their own",
    "has_aux": "what loss_fn returns beside the loss would be of a slice",
    "split": "a list of micro-batches has sequences of several lengths",
    "batch_dims": "the batch is dimension 0 of inputs, and the sequence dimension 1",
    "compile_stages": "stages read the keys and values of earlier slices from Python",
    "cuda_graphs": "each slice attends to another number of keys",
    "passes": "a pass sees the schedule and the program of whole micro-batches",
}
"""Keywords that a schedule of slices excludes, with the reason."""


def check_slices(schedule: Schedule, options: Any) -> None:
    """Raise ScheduleError for keywords with which `schedule`, if it divides sequences into slices, cannot run."""
    if schedule.n_slices == 1:
        return
    kinds = {action.kind for row in schedule.rows for action in row}
    what, why, hint = "", "", 'schedule="1f1b"'
    if Kind.BACKWARD not in kinds or Kind.INPUT_GRAD in kinds:
        divided = any(kind in BACKWARDS for kind in kinds)
        what = "has divided backwards, I and W" if divided else "has no backwards"
        why = "B of a slice adds to the gradients of the keys and values of earlier slices"
        hint = 'schedule="seq1f1b"'
    elif options.loss_fn is None:
        what, why = (
            "is given without loss_fn",
            "the losses of slices add up, and a loss of the model is of a whole sequence",
        )
        hint = "loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())"
    for name, reason in EXCLUDED.items():
        value = getattr(options, name)
        if not what and (value == "exact" if name == "across_batch" else value):
            what, why = f"is given together with {name}={shown(value)}", reason
            hint = f'no {name}; or schedule="1f1b"'
    if what:
        count = counted(schedule.n_slices, "slice")
        raise ScheduleError(f"schedule {shown(schedule.name)}, of {count} per micro-batch, {what}", why=why, hint=hint)
