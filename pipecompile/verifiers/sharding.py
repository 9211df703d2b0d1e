"""Verifier of the actions on sharded parameters: when a stage has its parameters, and when its gradients are summed.

                   UNSHARD                     RESHARD
        sharded ───────────────▶ unsharded ───────────────▶ sharded
                                 F R B I W ↺

Any other transition is a fault. A row ends with every stage sharded. A stage whose parameters are sharded and trained has one REDUCE_GRAD,
behind its last B or W; so may any other stage that is trained.

These are collectives over the copies of the pipeline. Copies run the same program, so each meets the others at the same place of the
same row: no cycle of waits can come of them, whatever the messages between devices do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipecompile.ir import NO_MICROBATCH, SHARDING, UNTRAINED, Action, Kind, Schedule

__all__ = ["microbatch_fault", "sharding_faults"]

_COMPUTED = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_ADDING = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def sharding_faults(schedule: Schedule) -> list[str]:
    """Return all faults of the actions on parameters. Counts and placement of the schedule must be right. Linear."""
    rows = schedule.rows
    gathered = {a.stage for row in rows for a in row if a.kind is Kind.UNSHARD}
    is_trained = any(a.kind not in UNTRAINED for row in rows for a in row)
    faults = [fault for device, row in enumerate(rows) for fault in _row_faults(row, device, gathered)]
    reduced = Counter(a.stage for row in rows for a in row if a.kind is Kind.REDUCE_GRAD)
    for stage in sorted(gathered | reduced.keys()):
        faults += _reduction_faults(stage, reduced[stage], is_gathered=stage in gathered, is_trained=is_trained)
    return faults


def _reduction_faults(stage: int, count: int, *, is_gathered: bool, is_trained: bool) -> Iterator[str]:
    action = Action(stage, Kind.REDUCE_GRAD)
    if count and not is_trained:
        yield f"{action} is run, and the schedule has no backward"
    elif count > 1:
        yield f"{action} is run {count} times, once is right"
    elif is_trained and is_gathered and not count:
        yield f"stage {stage} runs UNSHARD and never REDUCE_GRAD: its gradients stay those of one copy"


def _row_faults(row: Sequence[Action], device: int, gathered: set[int]) -> Iterator[str]:
    """Yield the faults of a row: transitions that are not there, and reductions that come too early."""
    whole: set[int] = set()
    last = {a.stage: index for index, a in enumerate(row) if a.kind in _ADDING}
    for index, action in enumerate(row):
        stage = action.stage
        if action.kind in _COMPUTED:
            if stage in gathered and stage not in whole:
                yield f"{action} runs while the parameters of stage {stage} are sharded\n      {_around(row, index, device)}"
        elif action.kind is Kind.UNSHARD:
            if stage in whole:
                yield f"{action}: the stage is unsharded already\n      {_around(row, index, device)}"
            whole.add(stage)
        elif action.kind is Kind.RESHARD:
            if stage not in whole:
                yield f"{action}: the stage is not unsharded\n      {_around(row, index, device)}"
            whole.discard(stage)
        elif action.kind is Kind.REDUCE_GRAD and last.get(stage, -1) > index:
            yield f"{action} runs before {row[last[stage]]}, which adds to its gradients\n      {_around(row, index, device)}"
    for stage in sorted(whole):
        yield f"{Action(stage, Kind.UNSHARD)}: no RESHARD comes after the last UNSHARD of stage {stage}"


def _around(row: Sequence[Action], index: int, device: int) -> str:
    """Return the excerpt of a row around an action."""
    before, after = "… " * (index > 1), " …" * (index + 2 < len(row))
    return f"device {device} │ {before}{' '.join(map(str, row[max(0, index - 1) : index + 2]))}{after}"


def microbatch_fault(action: Action, n_microbatches: int) -> str:
    """Return what is wrong with the micro-batch of an action; "" if nothing is."""
    if action.kind in SHARDING:
        is_right, expected = action.microbatch == NO_MICROBATCH, f"{action.kind.value} has no micro-batch"
    else:
        is_right = 0 <= action.microbatch < n_microbatches
        expected = f"micro-batches are 0 to {n_microbatches - 1}"
    return "" if is_right else expected
