"""Forward only, for inference: every device runs its stages on all micro-batches in ascending order.

    device 0 │ F0 F1 F2 F3              P = 3, M = 4
    device 1 │    F0 F1 F2 F3
    device 2 │       F0 F1 F2 F3
             └──────────────────▶ time

Bubble: (P - 1) / (M + P - 1); makespan (M + P - 1) tF.
Memory: no activation is kept for a backward.
When: for inference.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import action_queue, loop

__all__ = ["build_forward"]


def build_forward(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the forwards of all stages, stage by stage on each device; `n_devices` must divide `n_stages`."""
    rows = tuple(
        tuple(action for stage in range(d, n_stages, n_devices) for action in action_queue(stage, "F", n_microbatches))
        for d in range(n_devices)
    )
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "forward")
