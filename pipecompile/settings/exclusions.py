"""Keywords of `compile` that exclude or need each other: a plan, `offload`, `reshard_after_forward`, and schedules of slices."""

from __future__ import annotations

from typing import Any

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import BACKWARDS, Kind, Schedule
from pipecompile.ir.plan import Plan
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["EXCLUDED_BY_SLICES", "check_offload", "check_plan", "check_reshard", "check_slices"]

EXCLUDED_BY_SLICES: dict[str, str] = {
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
    for name, reason in EXCLUDED_BY_SLICES.items():
        value = getattr(options, name)
        if not what and (value == "exact" if name == "across_batch" else value):
            what, why = f"is given together with {name}={shown(value)}", reason
            hint = f'no {name}; or schedule="1f1b"'
    if what:
        count = counted(schedule.n_slices, "slice")
        raise ScheduleError(f"schedule {shown(schedule.name)}, of {count} per micro-batch, {what}", why=why, hint=hint)


def check_plan(plan: Plan, steering: Any, costs: Any, checkpoint: Any) -> None:
    """Raise InputError for keywords that a solved plan excludes, and for a choice that this plan has not made."""
    what, why, hint = "", "nothing is solved with a plan", "one of the two"
    if steering:
        what = "plan is given together with constraints on the cut (split_before, keep_together, pin or balance)"
    elif costs is not None:
        what = "plan is given together with costs"
    elif checkpoint == "auto" and not plan.recompute:
        what = 'checkpoint="auto" is given together with a plan that says of no stage whether it recomputes'
        why = "nothing is chosen with a plan"
        hint = 'checkpoint="always", or a plan that was made with checkpoint="auto"'
    if what:
        raise InputError(what, why=why, hint=hint)


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


def check_reshard(shards: int, schedule: Any, *, offload: bool, across_batch: str | None) -> None:
    """Raise InputError for a mesh, a schedule or a batch with which no parameter can be freed within a step.

    `shards` is the number of ranks that have a part of each parameter.
    """
    what, why, hint = "", "", "one of the two"
    if shards == 1:
        what, why = (
            "without a mesh that has dp_shard",
            "only parameters that copies of the pipeline shard are gathered and freed",
        )
        hint = 'mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))'
    elif isinstance(schedule, WrittenProgram):
        what, why = "together with a Program", "the program says itself when parameters are gathered"
        hint = "no reshard_after_forward"
    elif schedule == "auto":
        what, why = 'together with schedule="auto"', "its search counts all parameters as whole"
        hint = 'the name of a schedule, such as schedule="looped-bfs"'
    elif offload:
        what, why = "together with offload=True", "no prediction of memory counts both"
    elif across_batch == "exact":
        what, why = (
            'together with across_batch="exact"',
            "such a step runs two programs, one up to the loss and one from there on",
        )
    if what:
        raise InputError(f"reshard_after_forward=True is given {what}", why=why, hint=hint)
