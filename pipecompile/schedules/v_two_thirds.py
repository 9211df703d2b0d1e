"""V with two thirds of 1F1B's memory: between V-Half and ZBV.

    device 0 │ F0 F1 F2 F3    f0 i0 w0       f1 I0 i1 W0 f2 i2 w1 F4 I1 W1 f3 i3 I2 W2 w2 f4 i4 I3 W3 w3 w4 I4 W4
    device 1 │    F0 F1 F2 f0 F3    i0 w0 f1 I0 W0 f2 i1 w1    I1 i2 f3 W1 F4 I2 i3 W2 f4 w2 I3 i4 W3 w3 I4 W4 w4
    device 2 │       F0 f0 F1 f1 F2    i0 I0 W0 f2 w0 F3 i1 I1 W1 f3 i2 I2 w1 F4 W2 f4 i3 I3 w2 W3 i4 I4 w3 W4 w4
             └──────────────────────────────────────────────────────────────▶ time    6 stages on P = 3, M = 5

A list schedule under quotas, as V-Half: in a period of six actions a micro-batch takes the time of two actions from device to device
on all four passes through the V.

Bubble: makespan M T + k tF / 2 with k = 0, 1, 3, 4, 7, 10, 11, 13 for P = 1 to 8; for M = 2 P or 4 P, and equal times.
Memory: at most ((4 P + 5) div 3) / 2 micro-batches wait for their W on any device (one stage on a micro-batch counts half).
When: memory is limited to less than 1F1B's, but not to half of it.

Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, appendix on other building blocks; built here from
the quotas, not from the paper's repeated building block.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import vee
from pipecompile.schedules.v_list import list_schedule_on_vee

__all__ = ["build_v_two_thirds"]

_ORDERS = ("F1 F0 I0 I1", "I0 F1 I1 F0")


def build_v_two_thirds(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the faster of two priority orders for any number of micro-batches, with two stages per device."""
    devices = range(n_devices)
    quotas = [(8 * n_devices - 4 * d + 5) // 6 for d in devices], [(4 * d + 5) // 6 + 1 for d in devices]
    candidates = (list_schedule_on_vee(n_microbatches, quotas, (4 * n_devices + 5) // 3, order) for order in _ORDERS)
    rows = min(candidates, key=lambda candidate: candidate.seconds).rows
    return Schedule(n_stages, n_microbatches, vee(n_devices), rows, "v-two-thirds")
