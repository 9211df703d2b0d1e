"""ZB-H2: ZB-H1 with twice the warm-up. No device is idle between its first forward and its last W.

    device 0 │ F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    device 1 │    F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
    device 2 │       F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
             └───────────────────────────────────────────────────────────▶ time    P = 3, M = 6

Device d begins with 2 (P - d) - 1 forwards and ends with 2 d + 1 W, so the rows form a parallelogram.

Bubble: none within a device's own span of M T, at equal times; the makespan is M T + (P - 1) tF, if tI <= tF
and tI <= tW. Both for M >= 2 P - 1.
Memory: at most 2 P - 1 micro-batches wait for their W on any device, 2 (P - d) - 1 for their I on device d.
When: memory suffices for twice the micro-batches in flight, and the optimizer does not wait for other devices.

Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import action_queues, chain_after, loop, merge_queues

__all__ = ["build_zb_h2"]


def build_zb_h2(n_stages: int, n_microbatches: int, n_devices: int, after: Sequence[int] | None = None) -> Schedule:
    """Return the schedule with one stage per device. With fewer than 2 P - 1 micro-batches it is legal and has bubbles. `after` is the
    number of stages on the longest path after each stage, by default that of a chain.
    """
    after = after or chain_after(n_stages)
    rows = tuple(_row(stage, later, max(after) - later, n_microbatches) for stage, later in enumerate(after))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "zb-h2")


def _row(stage: int, later: int, delay: int, n_microbatches: int) -> tuple[Action, ...]:
    """Return the row of a stage: 2 `delay` pairs F I precede the first W, as far as there are forwards left."""
    warmup = 2 * later
    pairs = max(0, min(2 * delay, n_microbatches - warmup))
    return merge_queues(action_queues([stage], "FIW", n_microbatches), ("F", warmup), ("F I", pairs), ("F I W",))
