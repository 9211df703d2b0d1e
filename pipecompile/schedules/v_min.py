"""V-Min: the V of ZBV in a third of its memory.

    device 0 │ F0 F1 F2       f0 i0 w0    f1 i1 I0 W0 F3 w1 f2 i2 I1 W1 w2    f3 i3 I2 W2 w3    I3 W3
    device 1 │    F0 F1    f0       i0 f1 w0 I0 F2 i1 W0 f2 w1 I1 F3 i2 W1 f3 w2 I2 i3 W2 w3 I3 W3
    device 2 │       F0 f0 F1 f1       i0 I0 W0 w0 F2 f2 i1 I1 W1 w1 F3 f3 i2 I2 W2 w2 i3 I3 W3 w3
             └──────────────────────────────────────────────────────────────────────────────────────▶ time    P = 3, M = 4

A list schedule: of its first stage, device d has at most (4 P + 4 - 2 d) div 6 forwards waiting for their backward, of its
second (2 d + 6) div 6. That is what lies between F and I when a micro-batch enters every six cells, and goes from device
to device in one cell on all its ways through the V. When 3 divides P its ways would cross, and all takes two cells longer.

Bubble: makespan M T + (4 P - 5) tF / 2, M T + (4 P - 7) tF / 2 when 3 divides P; for M >= 2, P > 1 and equal times.
Memory: at most (P + 1) div 3 + 1 micro-batches wait for their W on any device (one stage on a micro-batch counts half).
When: memory is what there is least of.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024; built here from its quotas, not from its
repeated block.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.stage_placement import vee
from pipecompile.schedules.v_list import list_schedule_on_vee

__all__ = ["build_v_min"]


def build_v_min(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Two stages per device, any number of micro-batches."""
    longer = 0 if n_devices % 3 else 2
    first = [(4 * n_devices + 4 + longer - 2 * d) // 6 for d in range(n_devices)]
    second = [(2 * d + 6 + longer) // 6 for d in range(n_devices)]
    room = 2 * ((n_devices + 1) // 3 + 1)
    rows = list_schedule_on_vee(n_microbatches, (first, second), room, "F1 F0 I0 I1").rows
    return Schedule(n_stages, n_microbatches, vee(n_devices), rows, "v-min")
