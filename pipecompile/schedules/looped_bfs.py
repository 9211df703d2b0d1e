"""Looped breadth-first: a device runs all forwards of one of its stages before those of the next, then the backwards in the
same way from its last stage to its first. It is GPipe with several stages on a device.

    device 0 │ F0 F1 f0 f1          b0 b0 b1 b1 B0 B0 B1 B1
    device 1 │    F0 F1 f0 f1 b0 b0 b1 b1 B0 B0 B1 B1
             └────────────────────▶ time    4 stages on P = 2, M = 2, B twice as long as F; small letters: the device's second stage

Bubble: makespan M T + (P - 1)(tF + tB)/v for M >= P, with v stages on a device, which together take T = tF + tB.
Memory: every device holds all M micro-batches in flight.
When: memory suffices, and the gradients of a stage shall be complete early: all its backwards run together.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import action_queue, loop

__all__ = ["build_looped_bfs"]


def build_looped_bfs(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches; `n_devices` must divide `n_stages`."""
    rows = []
    for device in range(n_devices):
        stages = range(device, n_stages, n_devices)
        forwards = (action_queue(stage, "F", n_microbatches) for stage in stages)
        backwards = (action_queue(stage, "B", n_microbatches) for stage in reversed(stages))
        rows.append(tuple(action for part in (*forwards, *backwards) for action in part))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), tuple(rows), "looped-bfs")
