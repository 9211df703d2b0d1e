"""PipeOffload, half: interleaved 1F1B with two stages per device, of which the first is offloaded to the host.

    device 0 │ F0 F1 f0 f1 F2    b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1    b2 b2    b3 b3 B2 B2 B3 B3
    device 1 │    F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3
             └──────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 4

The copies are not drawn. The first stage of a device waits longest for its backwards, so half of the copies saves more than half of
the memory.

Bubble: as `interleaved`, makespan M T + (P - 1)(tF + tB)/2 for M >= P, if a copy takes no longer than an action.
Memory: at most (P + 2) / 2 micro-batches on any device for P > 2 and M divisible by P, if copies take no time.
When: `interleaved` needs too much memory, and a copy to the host takes longer than one action, but not than two.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", ICML 2025.
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Schedule
from pipecompile.passes.offloading import insert_offload
from pipecompile.schedules.interleaved import build_interleaved

__all__ = ["build_po_half"]


def build_po_half(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with two stages per device."""
    schedule = build_interleaved(n_stages, n_microbatches, n_devices)
    return replace(insert_offload(schedule, range(n_devices)), name="po-half")
