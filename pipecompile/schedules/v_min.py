"""V-Min: the V of ZBV with a third of its memory.

    device 0 │ F0 F1 F2       f0 i0 w0    f1 i1 I0 W0 F3 w1 f2 i2 I1 W1 w2    f3 i3 I2 W2 w3    I3 W3
    device 1 │    F0 F1    f0       i0 f1 w0 I0 F2 i1 W0 f2 w1 I1 F3 i2 W1 f3 w2 I2 i3 W2 w3 I3 W3
    device 2 │       F0 f0 F1 f1       i0 I0 W0 w0 F2 f2 i1 I1 W1 w1 F3 f3 i2 I2 W2 w2 i3 I3 W3 w3
             └──────────────────────────────────────────────────────────────────────────────────────▶ time    P = 3, M = 4

A list schedule under quotas: on device d at most (4 P + 4 - 2 d) div 6 forwards of the first stage wait for their I, and
(2 d + 6) div 6 of the second. These are the micro-batches between F and I if one enters every six actions and takes the time
of one action from device to device on all passes through the V. If 3 divides P, passes would collide; then a micro-batch
takes two actions longer, and both numerators are larger by 2.

Bubble: makespan M T + (4 P - 5) tF / 2, M T + (4 P - 7) tF / 2 if 3 divides P; for M >= 2, P > 1 and equal times.
Memory: at most (P + 1) div 3 + 1 micro-batches wait for their W on any device (one stage on a micro-batch counts half).
When: memory is the scarcest resource.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024; built here from the
quotas, not from the paper's repeated building block.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import vee
from pipecompile.schedules.v_list import list_schedule_on_vee

__all__ = ["build_v_min"]


def build_v_min(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with two stages per device."""
    longer = 0 if n_devices % 3 else 2
    first = [(4 * n_devices + 4 + longer - 2 * d) // 6 for d in range(n_devices)]
    second = [(2 * d + 6 + longer) // 6 for d in range(n_devices)]
    capacity = 2 * ((n_devices + 1) // 3 + 1)
    rows = list_schedule_on_vee(n_microbatches, (first, second), capacity, "F1 F0 I0 I1").rows
    return Schedule(n_stages, n_microbatches, vee(n_devices), rows, "v-min")
