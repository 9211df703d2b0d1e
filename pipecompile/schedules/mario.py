"""Mario: 1F1B that recomputes (R) while a device waits for a gradient, and only where another action comes between F and B.

    device 0 │ F0 F1 F2 R0          B0 B0 F3 R1 B1 B1 F4 R2 B2 B2 R3    B3 B3 R4 B4 B4
    device 1 │    F0 F1 R0    B0 B0 F2 R1 B1 B1 F3 R2 B2 B2 F4 R3 B3 B3 R4 B4 B4
    device 2 │       F0 B0 B0 F1 B1 B1 F2 B2 B2    F3 B3 B3    F4 B4 B4
             └──────────────────────────────────────────────────────────────▶ time    P = 3, M = 5, B twice as long as F

The last stage runs each backward directly after its forward and never recomputes. Mario also moves forwards ahead where a device
waits; here the forwards are those of 1F1B.

Bubble: makespan (M + P - 1)(tF + tB) + (M - 2) tF for M, P > 1, if R takes as long as F: two of M R cost nothing.
Memory: stage s holds the inputs of min(P - s, M) micro-batches, and what one saves.
When: memory allows less than 1F1B, and recomputation shall cost no more than it must.

Liu et al., "Mario: Near Zero-cost Activation Checkpointing in Pipeline Parallelism", PPoPP 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.schedules.one_f_one_b import build_one_f_one_b

__all__ = ["build_mario"]


def build_mario(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    schedule = build_one_f_one_b(n_stages, n_microbatches, n_devices)
    return replace(schedule, rows=tuple(tuple(_with_recompute(row)) for row in schedule.rows), name="mario")


def _with_recompute(row: Sequence[Action]) -> Iterator[Action]:
    """Yield the row with an R before each backward that does not follow its own forward directly."""
    yield row[0]
    for before, action in pairwise(row):
        if action.kind is Kind.BACKWARD and before != replace(action, kind=Kind.FORWARD):
            yield replace(action, kind=Kind.RECOMPUTE)
        yield action
