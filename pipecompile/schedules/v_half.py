"""V-Half: the V of ZBV with half of its memory.

    device 0 │ F0 F1 F2       f0 i0 w0       f1 I0 i1 W0 F3 w1 f2 i2 I1 W1 F4 w2 f3 i3 I2 W2 w3 f4 i4 I3 W3 w4    I4 W4
    device 1 │    F0 F1 F2 f0       i0 w0 f1 I0 W0    i1 f2 w1 F3 I1 i2 W1 f3 w2 F4 I2 i3 W2 f4 w3 I3 i4 W3 w4 I4 W4
    device 2 │       F0 f0 F1 f1       i0 I0 W0 F2 w0 f2 i1 I1 W1 F3 w1 f3 i2 I2 W2 F4 w2 f4 i3 I3 W3 w3 i4 I4 W4 w4
             └────────────────────────────────────────────────────────────────────────────────────────────▶ time    P = 3, M = 5

A list schedule under quotas: on device d at most P - d div 2 forwards of the first stage wait for their I (one more if P is
even), and 1 + (d + 1) div 2 of the second. These are the micro-batches between F and I if one enters every six actions and
takes the time of two actions from device to device on two of its four passes through the V, and of one on the others.

Bubble: makespan M T + (3 P - 7) tF / 2 for even P, M T + (3 P - 4) tF / 2 for odd P; for M >= 2 P > 4 and equal times.
Memory: at most P div 2 + 1 micro-batches wait for their W on any device (one stage on a micro-batch counts half).
When: memory is limited to half of 1F1B's, at the cost of some time.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024; built here from the
quotas, not from the paper's repeated building block.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import vee
from pipecompile.schedules.v_list import list_schedule_on_vee

__all__ = ["build_v_half"]

_ORDERS = ("F1 F0 I0 I1", "I0 F1 I1 F0")


def build_v_half(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with two stages per device. Of two priority orders the one that is
    faster for 2 P micro-batches is used.
    """
    even, devices = n_devices % 2 == 0, range(n_devices)
    quotas = [n_devices + even - d // 2 for d in devices], [1 + (d + 1) // 2 for d in devices]
    capacity = 2 * (n_devices // 2 + 1)
    few = min(n_microbatches, 2 * n_devices)
    order = min(_ORDERS, key=lambda order: list_schedule_on_vee(few, quotas, capacity, order).seconds)
    rows = list_schedule_on_vee(n_microbatches, quotas, capacity, order).rows
    return Schedule(n_stages, n_microbatches, vee(n_devices), rows, "v-half")
