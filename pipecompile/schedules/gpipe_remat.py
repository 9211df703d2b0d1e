"""GPipe with re-materialization: a forward keeps its inputs only, and R runs it again before its backward.

    device 0 │ F0 F1 F2 F3 R0                   B0 B0 R1 B1 B1 R2 B2 B2 R3 B3 B3
    device 1 │    F0 F1 F2 F3 R0          B0 B0 R1 B1 B1 R2 B2 B2 R3 B3 B3
    device 2 │       F0 F1 F2 F3 R0 B0 B0 R1 B1 B1 R2 B2 B2 R3 B3 B3
             └──────────────────────────────────────────────────────────────▶ time    P = 3, M = 4, B twice as long as F

A device restores its first micro-batch while it waits for the gradient, the others between its backwards.

Bubble: makespan (M + P - 1)(tF + tB) + M tF, if R takes as long as F.
Memory: every device holds the inputs of M micro-batches, and what one saves.
When: what a stage saves is much larger than its inputs, and GPipe's order is needed. `checkpoint="always"` adds R to any schedule.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
section 2.3, here with backwards in ascending order.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import action_queues, loop, merge_queues

__all__ = ["build_gpipe_remat"]


def build_gpipe_remat(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    rows = tuple(
        merge_queues(action_queues([stage], "FRB", n_microbatches), ("F", n_microbatches), ("R B",))
        for stage in range(n_stages)
    )
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "gpipe-remat")
