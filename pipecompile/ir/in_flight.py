"""The peak number of micro-batches in flight per device.

A micro-batch is in flight on a stage from its F until the action that releases what F saved. Of a schedule of slices, slices count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.ir import UNTRAINED, Action, Kind, Program, Schedule

__all__ = ["action_rows", "in_flight"]


def in_flight(
    rows: Sequence[Iterable[Action]], placement: Sequence[int], *, until: Kind = Kind.WEIGHT_GRAD
) -> tuple[float, ...]:
    """Return, per device, the peak number of micro-batches in flight; a stage counts 1/(number of stages on the
    device).

    A micro-batch is in flight until its B or W, or, with `until=Kind.INPUT_GRAD`, until its B or I, but not while the host holds what
    its F saved. Stages without a
    backward save nothing and do not count. Linear in the number of actions.
    """
    trained = {action.stage for row in rows for action in row if action.kind not in UNTRAINED}
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, until: -1, Kind.OFFLOAD: -1, Kind.RELOAD: 1}
    peaks = []
    for device, row in enumerate(rows):
        count = peak = 0
        for action in row:
            if action.stage in trained:
                count += change.get(action.kind, 0)
                peak = max(peak, count)
        peaks.append(peak / max(1, placement.count(device)))
    return tuple(peaks)


def action_rows(subject: Schedule | Program) -> list[list[Action]]:
    """Return the actions of each device, in order."""
    if isinstance(subject, Schedule):
        return [list(row) for row in subject.rows]
    return [[i.action for i in row if i.action is not None] for row in subject.rows]
