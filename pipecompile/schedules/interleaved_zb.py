"""Interleaved ZB-H1: the rounds of interleaved 1F1B with a split backward; device d delays W by d actions.

    device 0 │ F0 F1 f0 f1    i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
    device 1 │    F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
             └──────────────────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 4

Bubble: makespan M T + (P - 1)(tF + tI - tW)/v, if tW <= tF, tW <= tI and P divides M; at equal times no schedule
with these stages is shorter.
Memory: at most ((v - 1) R + P) / v micro-batches wait for their W on any device; R is the length of the longest round.
When: as `interleaved`, if backwards can be split.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2, here with
interleaved stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import chain_after, loop, merge_queues
from pipecompile.schedules.rounds import depth_first, microbatch_rounds

__all__ = ["build_interleaved_zb"]


def build_interleaved_zb(
    n_stages: int, n_microbatches: int, n_devices: int, after: Sequence[int] | None = None
) -> Schedule:
    """Return the schedule for any number of micro-batches and stages per device; `n_devices` must divide `n_stages`. `after` is the
    number of stages on the longest path after each stage, by default that of a chain.
    """
    groups, after = microbatch_rounds(n_microbatches, n_devices), after or chain_after(n_stages)
    rows = tuple(_row(range(device, n_stages, n_devices), groups, after) for device in range(n_devices))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "interleaved-zb")


def _row(stages: range, groups: tuple[range, ...], after: Sequence[int]) -> tuple[Action, ...]:
    """Return the row of a device, which delays each W by as many micro-batches as it has fewer stages after it than another."""
    last_stages = range(len(after) - stages.step, len(after))
    hops = after[stages[-1]]
    delay = max(after[stage] for stage in last_stages) - hops
    warmup = (len(stages) - 1) * len(groups[0]) + hops
    queues = {"F": depth_first(stages, "F", groups)}
    queues |= {kind: depth_first(stages[::-1], kind, groups) for kind in "IW"}
    return merge_queues(queues, ("F", warmup), ("F I", delay), ("F I W",))
