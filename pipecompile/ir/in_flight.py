"""How many micro-batches a device has in flight: their forward ran, and what it saved is still needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.ir import Action, Kind

__all__ = ["in_flight"]


def in_flight(
    rows: Sequence[Iterable[Action]], placement: Sequence[int], *, until: Kind = Kind.WEIGHT_GRAD
) -> tuple[float, ...]:
    """Per device the most that its row ever reaches; a stage counts 1/(number of stages there). Linear.

    Counted until B or W ran, or, with `until=Kind.INPUT_GRAD`, until B or I. Stages without a backward save nothing.
    """
    trained = {action.stage for row in rows for action in row if action.kind is not Kind.FORWARD}
    step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, until: -1}
    peaks = []
    for device, row in enumerate(rows):
        held = peak = 0
        for action in row:
            if action.stage in trained:
                held += step.get(action.kind, 0)
                peak = max(peak, held)
        peaks.append(peak / max(1, placement.count(device)))
    return tuple(peaks)
