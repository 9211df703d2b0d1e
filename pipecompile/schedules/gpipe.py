"""GPipe: all forwards, then all backwards, each in ascending order of micro-batches.

    device 0 │ F0 F1 F2 F3                      B0 B0 B1 B1 B2 B2 B3 B3        P = 3, M = 4,
    device 1 │    F0 F1 F2 F3             B0 B0 B1 B1 B2 B2 B3 B3              B twice as long as F
    device 2 │       F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
             └──────────────────────────────────────────────────▶ time

Bubble: (P - 1) / (M + P - 1); makespan (M + P - 1)(tF + tB).
Memory: every device holds all M micro-batches in flight.

With v stages on a device the forwards go stage by stage, the backwards from the last stage down ("breadth first"):

    device 0 │ 0F0 0F1 2F0 2F1          2B0 2B1 0B0 0B1                        4 stages on 2 devices, M = 2
    device 1 │     1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019;
Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, for v > 1.
"""

from __future__ import annotations

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.schedules.placement import loop

__all__ = ["build_gpipe"]


def build_gpipe(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """GPipe on `n_devices` devices, which must divide `n_stages`."""
    rows = []
    for device in range(n_devices):
        stages = range(device, n_stages, n_devices)
        forwards = [Action(stage, Kind.FORWARD, m) for stage in stages for m in range(n_microbatches)]
        backwards = [Action(stage, Kind.BACKWARD, m) for stage in reversed(stages) for m in range(n_microbatches)]
        rows.append((*forwards, *backwards))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), tuple(rows), "gpipe")
