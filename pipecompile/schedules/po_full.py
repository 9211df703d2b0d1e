"""PipeOffload, full: interleaved 1F1B in which the host holds what forwards saved until shortly before their backward.

    device 0 │ F0 F1 f0 f1 F2    b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1    b2 b2    b3 b3 B2 B2 B3 B3
    device 1 │    F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3
             └──────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 4

The copies are not drawn. OFFLOAD stands after its forward and RELOAD one action before its backward, so that copies run beside
other actions. Cells with fewer than two actions between F and B stay on the device.

Bubble: as `interleaved`, makespan M T + (P - 1)(tF + tB)/v for M >= P, if a copy takes no longer than an action.
Memory: two micro-batches on one stage each on every device, for any P and M, if copies take no time.
When: memory is scarce, and a copy to the host takes no longer than an action. `pc.offload_to_fit` moves as few cells as a limit needs.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", ICML 2025.
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Schedule
from pipecompile.passes.offloading import insert_offload
from pipecompile.schedules.interleaved import build_interleaved

__all__ = ["build_po_full"]


def build_po_full(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches and stages per device; `n_devices` must divide `n_stages`."""
    return replace(insert_offload(build_interleaved(n_stages, n_microbatches, n_devices)), name="po-full")
