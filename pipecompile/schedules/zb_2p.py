"""ZB-2p: ZB-1p with twice the memory on every device.

    device 0 │ F0 F1 F2 F3 F4 F5 I0 W0 I1 W1 I2 W2 I3 W3 I4 I5 W4 W5
    device 1 │    F0 F1 F2 F3 I0 F4 I1 F5 I2 W0 I3 W1 I4 I5 W2 W3 W4 W5
    device 2 │       F0 F1 I0 F2 I1 F3 I2 F4 I3 F5 I4 I5 W0 W1 W2 W3 W4 W5
             └────────────────────────────────────────────────────────────▶ time    P = 3, M = 6

Bubble: makespan M T + (P - 1) tF at equal times, for M > P.
Memory: at most 2 P micro-batches wait for their W on any device, and 2 (P - d) for their I on device d.
When: as `zb-h2`. For the costs of your model use `auto_schedule`, which searches under them and not at equal times.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3; here a list schedule at equal times takes the place of
the paper's heuristic.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.zb_limited import zero_bubble_within

__all__ = ["build_zb_2p"]


def build_zb_2p(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    return zero_bubble_within(2 * n_devices, n_stages, n_microbatches, "zb-2p")
