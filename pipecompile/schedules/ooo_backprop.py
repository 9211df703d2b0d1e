"""Out-of-order backprop: GPipe with a split backward. All gradients of inputs (I) come first, all gradients of weights (W) last.

    device 0 │ F0 F1 F2 F3             I0 I1 I2 I3 W0 W1 W2 W3
    device 1 │    F0 F1 F2 F3       I0 I1 I2 I3 W0 W1 W2 W3
    device 2 │       F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3
             └────────────────────────────────────────────────▶ time    P = 3, M = 4

The authors call it gradient fast-forwarding: no device waits for a W of another.

Bubble: makespan M T + (P - 1)(tF + tI), with T = tF + tI + tW: GPipe's without (P - 1) tW.
Memory: every device holds all M micro-batches until their W.
When: memory suffices for GPipe, and its order is needed.

Oh et al., "Out-of-Order BackProp: An Effective Scheduling Technique for Deep Learning", EuroSys 2022.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import action_queues, loop, merge_queues

__all__ = ["build_ooo_backprop"]


def build_ooo_backprop(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    rows = tuple(
        merge_queues(action_queues([stage], "FIW", n_microbatches), ("F",), ("I",), ("W",)) for stage in range(n_stages)
    )
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "ooo-backprop")
