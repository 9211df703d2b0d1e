"""Hanayo: stages run to and fro over the devices in waves, so that half of the transfers at the turns are saved.

    device 0 │ F0 F1 F2 f0 b0 b0 f1 b1 b1    B0 B0       B1 B1 f2 b2 b2             B2 B2
    device 1 │    F0 f0 F1 f1 F2 b0 b0 B0 B0 b1 b1 B1 B1 f2             b2 b2 B2 B2
             └──────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 3

A list schedule at equal times, backwards first: a wave is a V of two stages per device, four stages are two waves. At most 3 P / 2
micro-batches are in flight on a device.

Bubble: makespan M T + 2 (P - 1) tF for M = P, one wave and tB = 2 tF: two thirds of 1F1B's bubble, and with two waves about
a third.
Memory: at most (3 P + 1) div 2 micro-batches in flight on every device, P for M = P.
When: M is about P, backwards cannot be split, and every device shall hold equally much.

Liu, Cheng, Zhou, You, "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency", SC 2023.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import zigzag
from pipecompile.schedules.search.list_scheduling import PriorityRule, list_schedule
from pipecompile.schedules.search.workload import unit_workload

__all__ = ["build_hanayo"]


def build_hanayo(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches and of stages per device; `n_devices` must divide `n_stages`."""
    placement, stages = zigzag(n_stages, n_devices), range(n_stages)
    rule = PriorityRule((inf,) * n_stages, tuple(2.0 * n_stages - s for s in stages), tuple(map(float, stages)))
    capacity = (3 * n_devices + 1) // 2 * (n_stages // n_devices)
    workload = replace(unit_workload(placement), split=False)
    result = list_schedule(workload, n_microbatches, (capacity,) * n_devices, rule)
    assert result is not None, "one micro-batch fits"
    return Schedule(n_stages, n_microbatches, placement, result.rows, "hanayo")
