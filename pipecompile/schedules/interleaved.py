"""Interleaved 1F1B: every device has v stages, placed in a loop, and runs rounds of P micro-batches through them.

    device 0 │ F0 F1 f0 f1 F2    b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1    b2 b2    b3 b3 B2 B2 B3 B3
    device 1 │    F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3
             └──────────────────────────────────────▶ time    4 stages on P = 2, M = 4; small letters: the device's second stage

A round of forwards runs through all stages of a device in ascending order, a round of backwards in descending order.

Bubble: makespan M T + (P - 1)(tF + tB)/v for any M >= P, with T = tF + tB of all stages of a device: 1/v of 1F1B's bubble.
Rounds of more than P micro-batches take more memory, not more time.
Memory: ((v - 1) R + 2 (P - d) - 1) / v micro-batches on device d; R is the length of the longest round (P if P divides M).
When: M is small relative to P, and links are fast: 1/v of the bubble, for v times the messages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import chain_after, loop, merge_queues
from pipecompile.schedules.rounds import depth_first, microbatch_rounds

__all__ = ["build_interleaved", "interleaved_rows"]


def build_interleaved(
    n_stages: int, n_microbatches: int, n_devices: int, after: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule for any number of micro-batches and stages per device; `n_devices` must divide `n_stages`. `after` is the
    number of stages on the longest path after each stage, by default that of a chain.
    """
    rows = interleaved_rows(n_stages, n_devices, microbatch_rounds(n_microbatches, n_devices), after)
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "interleaved")


def interleaved_rows(
    n_stages: int, n_devices: int, rounds: tuple[range, ...], after: Sequence[int] | None = None
) -> tuple[tuple[Action, ...], ...]:
    """Return the row of each device for these rounds of micro-batches."""
    after = after or chain_after(n_stages)
    return tuple(_row(range(device, n_stages, n_devices), rounds, after) for device in range(n_devices))


def _row(stages: range, groups: tuple[range, ...], after: Sequence[int]) -> tuple[Action, ...]:
    """Return the row of a device. The warm-up is the first round through all stages but the last, and the micro-batches between
    this device and the last.
    """
    hops = after[stages[-1]]
    warmup = (len(stages) - 1) * len(groups[0]) + (2 * hops if len(stages) > 1 else hops)
    queues = {"F": depth_first(stages, "F", groups), "B": depth_first(stages[::-1], "B", groups)}
    return merge_queues(queues, ("F", warmup), ("F B",))
