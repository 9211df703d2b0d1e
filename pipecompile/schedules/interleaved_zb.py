"""Interleaved ZB-H1: the rounds of interleaved 1F1B with the backward split, W put off by d cells on device d.

    device 0 │ F0 F1 f0 f1    i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    device 1 │    F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
             └──────────────────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 4

Bubble: makespan M T + (P - 1)(tF + tI - tW)/v, where tW is no more than tF and tI and P divides M; at equal times that
is the least that there is.
Memory: ((v - 1) R + P) / v micro-batches wait for their W on any device, R the length of the longest round.
When: as `interleaved`, with backwards that can be split.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024.
"""

from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.action_queues import merge_queues
from pipecompile.schedules.rounds import depth_first, microbatch_rounds
from pipecompile.schedules.stage_placement import loop

__all__ = ["build_interleaved_zb"]


def build_interleaved_zb(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Any number of micro-batches and of stages on a device; `n_devices` must divide `n_stages`."""
    parts = microbatch_rounds(n_microbatches, n_devices)
    rows = tuple(_row(range(device, n_stages, n_devices), parts, n_devices) for device in range(n_devices))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "interleaved-zb")


def _row(stages: range, parts: tuple[range, ...], n_devices: int) -> tuple[Action, ...]:
    device = stages[0]
    warmup = (len(stages) - 1) * len(parts[0]) + n_devices - 1 - device
    all_three = {"F": depth_first(stages, "F", parts)}
    all_three |= {kind: depth_first(stages[::-1], kind, parts) for kind in "IW"}
    return merge_queues(all_three, ("F", warmup), ("F I", device), ("F I W",))
