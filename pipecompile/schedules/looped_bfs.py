"""Looped breadth-first: a device finishes all forwards of one of its stages before it begins the next, and the backwards
likewise from the last stage down. GPipe with several stages on a device.

    device 0 │ F0 F1 f0 f1          b0 b0 b1 b1 B0 B0 B1 B1
    device 1 │    F0 F1 f0 f1 b0 b0 b1 b1 B0 B0 B1 B1
             └────────────────────▶ time    4 stages on P = 2, M = 2, B twice as long as F; small letters: the device's second stage

Bubble: makespan M T + (P - 1)(tF + tB)/v for M >= P, with v stages on a device and T = tF + tB of them together.
Memory: every device holds all M micro-batches in flight.
When: there is memory, and gradients of a stage are to be complete early: all its backwards come together.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.action_queues import action_queue
from pipecompile.schedules.stage_placement import loop

__all__ = ["build_looped_bfs"]


def build_looped_bfs(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Any number of micro-batches, any number of stages on a device; `n_devices` must divide `n_stages`."""
    rows = []
    for device in range(n_devices):
        stages = range(device, n_stages, n_devices)
        forwards = (action_queue(stage, "F", n_microbatches) for stage in stages)
        backwards = (action_queue(stage, "B", n_microbatches) for stage in reversed(stages))
        rows.append(tuple(action for part in (*forwards, *backwards) for action in part))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), tuple(rows), "looped-bfs")
