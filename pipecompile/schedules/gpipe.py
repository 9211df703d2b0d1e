"""GPipe: all forwards, then all backwards, each in ascending order of micro-batches.

    device 0 │ F0 F1 F2 F3                   B0 B0 B1 B1 B2 B2 B3 B3
    device 1 │    F0 F1 F2 F3          B0 B0 B1 B1 B2 B2 B3 B3
    device 2 │       F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
             └─────────────────────────────────────────────────────▶ time    P = 3, M = 4, B twice as long as F

Bubble: (P - 1) / (M + P - 1); makespan (M + P - 1)(tF + tB).
Memory: every device holds all M micro-batches in flight.
When: activations are small, or stages are recomputed anyway. `pipe(x)` always runs in this order, because its backward comes later.

With several stages on a device the order is breadth-first, as in `looped-bfs`.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
section 2.3.
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Schedule
from pipecompile.schedules.looped_bfs import build_looped_bfs

__all__ = ["build_gpipe"]


def build_gpipe(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return GPipe for any number of micro-batches; `n_devices` must divide `n_stages`."""
    return replace(build_looped_bfs(n_stages, n_microbatches, n_devices), name="gpipe")
