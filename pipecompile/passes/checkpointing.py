"""Checkpointing: a forward keeps only its inputs, and R runs it once more before its backward.

    before   0F0 0F1 0B0 0B1                    after   0F0 0F1 0R0 0B0 0R1 0B1      "always"
                                                        0F0 0F1 0R0 0B0 0B1          "except_last"

R stands right before B or I, and so ahead of the gradient that those wait for: transfers are received by who reads them.
Linear. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; the modes are those of torchgpipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.errors import ScheduleError
from pipecompile.ir import Action, Kind, Schedule

__all__ = ["Checkpoint", "insert_recompute"]

Checkpoint = str | Sequence[bool]
"""`"never"`, `"always"`, `"except_last"` (all micro-batches but the last), or a flag per stage."""


def insert_recompute(schedule: Schedule, checkpoint: Checkpoint) -> Schedule:
    """An R for every cell that `checkpoint` says, unless it has one. Raises ScheduleError for a mode that is none."""
    flags = _flags(schedule.n_stages, checkpoint)
    last = schedule.n_microbatches - 1 if checkpoint == "except_last" else None
    have = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}

    def expand(row: Sequence[Action]) -> Iterator[Action]:
        for action in row:
            is_back = action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
            is_bare = action.microbatch != last and (action.stage, action.microbatch) not in have
            if is_back and is_bare and flags[action.stage]:
                yield replace(action, kind=Kind.RECOMPUTE)
            yield action

    return replace(schedule, rows=tuple(tuple(expand(row)) for row in schedule.rows))


def _flags(n_stages: int, checkpoint: Checkpoint) -> tuple[bool, ...]:
    if isinstance(checkpoint, str):
        if checkpoint not in ("never", "always", "except_last"):
            raise ScheduleError(
                f"checkpoint={checkpoint!r} is not known",
                hint="'never', 'always', 'except_last', a flag per stage, or, with a model, 'auto'",
            )
        return (checkpoint != "never",) * n_stages
    if len(checkpoint) != n_stages:
        raise ScheduleError(f"checkpoint has {len(checkpoint)} flags for {n_stages} stages")
    return tuple(map(bool, checkpoint))
