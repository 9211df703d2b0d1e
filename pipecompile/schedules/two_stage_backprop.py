"""2BP on 1F1B: the second half of every backward (W) is put off until the device has no forward left, and then fills its waits.

    device 0 │ F0 F1 F2       I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
    device 1 │    F0 F1    I0 F2 I1 F3 I2 F4 I3 W0 I4 W1 W2 W3 W4
    device 2 │       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
             └───────────────────────────────────────────────────▶ time    P = 3, M = 5

Bubble: makespan M T + (P - 1)(tF + tI - tW), with T = tF + tI + tW, if tW <= tF + tI and M >= 2 P - 2.
Memory: every device holds all M micro-batches until their W; P - d of them wait for their I on device d.
When: all W of a stage shall run together, for example as one larger operation, and memory suffices for all micro-batches.

Rae, Lee, Richings, "2BP: 2-Stage Backpropagation", 2024 (arXiv 2405.18047).
"""

from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import action_queues, chain_after, loop, merge_queues

__all__ = ["build_two_stage_backprop"]


def build_two_stage_backprop(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    rows = tuple(_row(stage, later, n_microbatches) for stage, later in enumerate(chain_after(n_stages)))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "2bp")


def _row(stage: int, later: int, n_microbatches: int) -> tuple[Action, ...]:
    warmup = min(later, n_microbatches - 1)
    queues = action_queues([stage], "FIW", n_microbatches)
    return merge_queues(queues, ("F", warmup), ("F I", n_microbatches - warmup), ("W I", warmup), ("W",))
