"""DualPipeV: two stages per device in a V; forwards of one half alternate with backwards of the other.

    device 0 │ F0 F1 F2 f0 i0 w0 f1 F3 b1 b1 f2 B0 B0 F4 b2 b2 f3 B1 B1 b3 b3 f4    B2 B2 b4 b4 I3 W3 I4 W4
    device 1 │    F0 f0 F1 f1 F2 b0 b0 f2 B0 B0 F3 b1 b1 f3 B1 B1 F4 b2 b2 f4 B2 B2 b3 b3 B3 B3 i4 I4 w4 W4
             └────────────────────────────────────────────────────────────────────────────────────────────▶ time    P = 2, M = 5

In the steady phase a device alternates F of one stage with B of the other. The paper runs each such pair at the same time, to
overlap the communication of one with the compute of the other; here the two actions run one after the other.

Bubble: makespan M T + (P - 1) tF / 2 at equal times, for M >= 2 P.
Memory: at most P + 1/2 micro-batches in flight on every device.
When: a forward and a backward can run at the same time and overlap each other's communication.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1; the V form is in its repository DualPipe (after Qi et al.,
"cut in half").
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.schedules.building_blocks import action_queues, merge_queues, vee
from pipecompile.schedules.v_list import few_on_vee

__all__ = ["build_dualpipev"]


def build_dualpipev(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule with two stages per device. Fewer than 2 P micro-batches cannot fill both directions of the V, and are list
    scheduled.
    """
    if n_microbatches >= 2 * n_devices:
        rows = tuple(_row(device, n_devices, n_microbatches) for device in range(n_devices))
    else:
        rows = few_on_vee(n_microbatches, n_devices).rows
    return Schedule(n_stages, n_microbatches, vee(n_devices), rows, "dualpipev")


def _row(device: int, n_devices: int, n_microbatches: int) -> tuple[Action, ...]:
    """Return the row of a device. The first backwards and the last P are split: their W fill idle time at the turn of the V and at
    the end.
    """
    stages, hops = (device, 2 * n_devices - 1 - device), n_devices - 1 - device
    backwards = merge_queues(action_queues(stages, "B", n_microbatches), ("B1", hops), ("B1 B0",))
    split = {*backwards[:hops], *backwards[-n_devices:]}
    queues = {
        **action_queues(stages, "F", n_microbatches),
        "B": [replace(b, kind=Kind.INPUT_GRAD) if b in split else b for b in backwards],
        "W": [replace(b, kind=Kind.WEIGHT_GRAD) for b in backwards if b in split],
    }
    steady = n_microbatches - 2 * n_devices + device + 1
    return merge_queues(
        queues,
        ("F0", 2 * hops),
        ("F0 F1", device + 1),
        ("B W F1", hops),
        ("F0 B F1 B", steady),
        ("B F1 B", hops),
        ("B", 2 * (device + 1)),
        ("W B", hops),
        ("W",),
    )
