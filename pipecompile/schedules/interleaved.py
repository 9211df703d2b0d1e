"""Interleaved 1F1B: every device has v stages, dealt out in a loop, and takes rounds of P micro-batches through them.

    device 0 │ F0 F1 f0 f1 F2    b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1    b2 b2    b3 b3 B2 B2 B3 B3
    device 1 │    F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3
             └──────────────────────────────────────▶ time    4 stages on P = 2, M = 4; small letters: the device's second stage

A round of forwards goes through all stages of a device, then a round of backwards comes back through them.

Bubble: makespan M T + (P - 1)(tF + tB)/v, with T = tF + tB of all stages of a device: 1/v of 1F1B's bubble. For any
M >= P: rounds of more than P micro-batches cost memory, not time.
Memory: ((v - 1) R + 2 (P - d) - 1) / v micro-batches on device d, R the length of the longest round (P when P divides M).
When: M is small against P, and links are fast: a v-th of the bubble, for v times the messages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.action_queues import merge_queues
from pipecompile.schedules.rounds import depth_first, microbatch_rounds
from pipecompile.schedules.stage_placement import loop

__all__ = ["build_interleaved"]


def build_interleaved(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Any number of micro-batches and of stages on a device; `n_devices` must divide `n_stages`."""
    parts = microbatch_rounds(n_microbatches, n_devices)
    rows = tuple(_row(range(device, n_stages, n_devices), parts, n_devices) for device in range(n_devices))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "interleaved")


def _row(stages: range, parts: tuple[range, ...], n_devices: int) -> tuple[Action, ...]:
    """The warm-up: the first round through all stages but the last, and what is on its way to and from the last device."""
    hops = n_devices - 1 - stages[0]
    warmup = (len(stages) - 1) * len(parts[0]) + (2 * hops if len(stages) > 1 else hops)
    both = {"F": depth_first(stages, "F", parts), "B": depth_first(stages[::-1], "B", parts)}
    return merge_queues(both, ("F", warmup), ("F B",))
