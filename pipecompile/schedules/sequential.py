"""Sequential: one micro-batch after another runs through all stages and back. One device works at a time.

    device 0 │ F0                   B0 B0 F1                   B1 B1
    device 1 │    F0          B0 B0          F1          B1 B1
    device 2 │       F0 B0 B0                   F1 B1 B1
             └──────────────────────────────────────────────────────▶ time    P = 3, M = 2, B twice as long as F

Bubble: (P - 1) / P; makespan M P (tF + tB).
Memory: one micro-batch on every device, the least of all schedules without recomputation.
When: as the yardstick of other schedules, or if a single micro-batch barely fits.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, figure 2 (b).
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import loop, serial

__all__ = ["build_sequential"]


def build_sequential(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches; `n_devices` must divide `n_stages`."""
    return replace(serial(loop(n_stages, n_devices), n_microbatches), name="sequential")
