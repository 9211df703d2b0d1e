"""Checkpointing: a forward keeps only its inputs, and R runs the forward again before its backward.

    before   0F0 0F1 0B0 0B1                    after   0F0 0F1 0R0 0B0 0R1 0B1      "always"
                                                        0F0 0F1 0R0 0B0 0B1          "except_last"

R stands directly before B or I and therefore before the receive of their gradients, since a later pass inserts receives before
their first reader. If B or I overlaps with a forward, R stands before both. Linear. Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016; the modes are those of torchgpipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.errors import ScheduleError
from pipecompile.ir import BACKWARDS, Action, Kind, Schedule
from pipecompile.ir.overlap import grouped
from pipecompile.text.shown_value import shown

__all__ = ["Checkpoint", "insert_recompute"]

Checkpoint = str | Sequence[bool]
"""`"never"`, `"always"`, `"except_last"` (all micro-batches but the last), or one flag per stage."""


def insert_recompute(schedule: Schedule, checkpoint: Checkpoint) -> Schedule:
    """Return the schedule with an R for every cell that `checkpoint` selects, unless the cell has one or is offloaded to the host.

    Raise ScheduleError for an unknown mode or a wrong number of flags.
    """
    flags = _flags(schedule.n_stages, checkpoint)
    if not any(flags):
        return schedule
    is_last_kept = isinstance(checkpoint, str) and checkpoint == "except_last"
    last = schedule.n_microbatches - 1 if is_last_kept else None
    kinds = (Kind.RECOMPUTE, Kind.OFFLOAD)
    freed = {a.cell for row in schedule.rows for a in row if a.kind in kinds}

    def expand(row: Sequence[Action]) -> Iterator[Action]:
        for cell in grouped(row, schedule.overlaps):
            for action in cell:
                is_backward = action.kind in BACKWARDS
                needs_recompute = action.microbatch != last and action.cell not in freed
                if is_backward and needs_recompute and flags[action.stage]:
                    yield replace(action, kind=Kind.RECOMPUTE)
            yield from cell

    return replace(schedule, rows=tuple(tuple(expand(row)) for row in schedule.rows), certificate=None)


def _flags(n_stages: int, checkpoint: Checkpoint) -> tuple[bool, ...]:
    if isinstance(checkpoint, str):
        if checkpoint not in ("never", "always", "except_last"):
            raise ScheduleError(
                f"checkpoint={shown(checkpoint)} is not known",
                hint="pass 'never', 'always', 'except_last', one flag per stage, or, with a model, 'auto'",
            )
        return (checkpoint != "never",) * n_stages
    try:
        flags = tuple(map(bool, checkpoint))
    except (TypeError, ValueError, RuntimeError):
        hint = "'always', or one flag per stage"
        raise ScheduleError(f"checkpoint={shown(checkpoint)} is not known", hint=hint) from None
    if len(flags) != n_stages:
        raise ScheduleError(
            f"checkpoint has {len(flags)} flag{'s' * (len(flags) != 1)} for {n_stages} stage{'s' * (n_stages != 1)}",
            hint="pass one flag per stage",
        )
    return flags
