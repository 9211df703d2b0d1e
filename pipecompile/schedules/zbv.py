"""ZBV: two stages per device in a V, with a split backward. No device is idle between its first forward and its last W, and
none needs more memory than the first device of 1F1B.

    device 0 │ F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
    device 1 │    F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
             └──────────────────────────────────────────────────▶ time    P = 2, M = 4; small letters: the device's second stage

The first device also has the last stage, so the first backward follows the last forward at once, and all devices hold
equally much.

Bubble: none within a device's own span of M T; the makespan is M T + (P - 1) tF / 2, for M >= 2 P - 1 and equal times.
Memory: at most P micro-batches wait for their W on any device (one stage on a micro-batch counts half).
When: memory suffices for 1F1B, and links are fast: no device is idle within its span, and all hold equally much.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6.
"""

from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import action_queues, merge_queues, vee
from pipecompile.schedules.v_list import few_on_vee

__all__ = ["build_zbv"]


def build_zbv(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule with two stages per device. Fewer than 2 P - 1 micro-batches cannot fill the V, and are list scheduled
    within the same memory.
    """
    if n_microbatches >= 2 * n_devices - 1:
        rows = tuple(_row(device, n_devices, n_microbatches) for device in range(n_devices))
    else:
        rows = few_on_vee(n_microbatches, n_devices).rows
    return Schedule(n_stages, n_microbatches, vee(n_devices), rows, "zbv")


def _row(device: int, n_devices: int, n_microbatches: int) -> tuple[Action, ...]:
    hops = n_devices - device
    return merge_queues(
        action_queues((device, 2 * n_devices - 1 - device), "FIW", n_microbatches),
        ("F0", 2 * hops - 1),
        ("F1 F0", device),
        ("F1 I1 W1", hops),
        ("F0 I0 W0 F1 I1 W1", n_microbatches - n_devices),
        ("I0 I1", device),
        ("I0 W0", hops),
        ("W1",),
        ("W0",),
    )
