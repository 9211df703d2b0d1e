"""ZB-H1: 1F1B with a split backward. The gradient of the inputs (I) is sent at once; the gradient of the weights (W)
waits, and fills idle time of 1F1B's cool-down.

    device 0 │ F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    device 1 │    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    device 2 │       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
             └──────────────────────────────────────────────────▶ time    P = 3, M = 5

Device d delays its W by d micro-batches: it holds d fewer forwards in flight than device 0, and d more waiting W.

Bubble: makespan M T + (P - 1)(tF + tI - tW), with T = tF + tI + tW, if tW <= tF, tW <= tI and M >= P; at
equal times no schedule with one stage per device is shorter.
Memory: at most P micro-batches wait for their W on any device, and P - d for their I on device d, as in 1F1B.
When: memory suffices for 1F1B and no more: the same memory, and a third of the bubble.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import action_queues, chain_after, loop, merge_queues

__all__ = ["build_zb_h1"]


def build_zb_h1(n_stages: int, n_microbatches: int, n_devices: int, after: Sequence[int] | None = None) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device. `after` is the number of stages on the
    longest path after each stage, by default that of a chain.
    """
    after = after or chain_after(n_stages)
    rows = tuple(_row(stage, later, max(after) - later, n_microbatches) for stage, later in enumerate(after))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "zb-h1")


def _row(stage: int, later: int, delay: int, n_microbatches: int) -> tuple[Action, ...]:
    """Return the row of a stage with `later` stages after it, which delays each W by `delay` micro-batches."""
    return merge_queues(action_queues([stage], "FIW", n_microbatches), ("F", later), ("F I", delay), ("F I W",))
