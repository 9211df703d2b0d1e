"""ZB-1p: the split backward of ZB-H1, with the orders of F, I and W found under the memory of 1F1B on every device.

    device 0 │ F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 F6 I4 W4 F7 I5 W5 I6 W6 I7 W7
    device 1 │    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 F6 I5 W4 F7 I6 W5 I7 W6 W7
    device 2 │       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 F6 I6 W4 F7 I7 W5 W6 W7
             └──────────────────────────────────────────────────────────────▶ time    P = 3, M = 8

W runs where a device would wait, or where no memory is left for a forward. ZB-H1 delays W by a fixed number of micro-batches instead.

Bubble: makespan M T + (P - 1) tF at equal times, for M >= P.
Memory: at most P micro-batches wait for their W on any device, and P - d for their I on device d.
When: as `zb-h1`. For the costs of your model use `auto_schedule`, which searches under them and not at equal times.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3; here a list schedule at equal times takes the place of
the paper's heuristic.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.zb_limited import zero_bubble_within

__all__ = ["build_zb_1p"]


def build_zb_1p(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    return zero_bubble_within(1 * n_devices, n_stages, n_microbatches, "zb-1p")
