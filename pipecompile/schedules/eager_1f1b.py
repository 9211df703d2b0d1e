"""Eager 1F1B: 1F1B with twice the warm-up, so that a transfer has the time of one more action before its value is needed.

    device 0 │ F0 F1 F2 F3 F4       B0 B0    B1 B1    B2 B2    B3 B3    B4 B4
    device 1 │    F0 F1 F2    B0 B0 F3 B1 B1 F4 B2 B2    B3 B3    B4 B4
    device 2 │       F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4
             └──────────────────────────────────────────────────────────────▶ time    P = 3, M = 5, B twice as long as F

Bubble: as 1F1B, makespan (M + P - 1)(tF + tB). Transfers of up to tB / 2 add 2 (P - 1) times their duration, for any M.
Memory: stage s holds at most min(2 (P - s) - 1, M) micro-batches in flight.
When: links are slow, and memory suffices for twice the micro-batches in flight.

Zhuang et al., "On Optimizing the Communication of Model Parallelism", MLSys 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import action_queues, chain_after, loop, merge_queues

__all__ = ["build_eager_1f1b"]


def build_eager_1f1b(
    n_stages: int, n_microbatches: int, n_devices: int, after: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device. `after` is the number of stages on the
    longest path after each stage, by default that of a chain.
    """
    rows = tuple(
        merge_queues(action_queues([stage], "FB", n_microbatches), ("F", 2 * later), ("F B",))
        for stage, later in enumerate(after or chain_after(n_stages))
    )
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "eager-1f1b")
