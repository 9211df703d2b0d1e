"""Seq1F1B: 1F1B on slices of micro-batches along the sequence, for causal models: B of the last slice of a micro-batch comes first.

    device 0 │ F0.0 F0.1 F1.0 F1.1                     B0.1 B0.1      B0.0 B0.0      B1.1 B1.1 B1.0 B1.0
    device 1 │      F0.0 F0.1 F1.0           B0.1 B0.1 F1.1 B0.0 B0.0      B1.1 B1.1 B1.0 B1.0
    device 2 │           F0.0 F0.1 B0.1 B0.1 F1.0 B0.0 B0.0 F1.1 B1.1 B1.1 B1.0 B1.0
             └──────────────────────────────────────────────────────────────────────▶ time    P = 3, M = 2, k = 2 slices, B twice as long as F

A device begins backwards when it has the forwards of a whole micro-batch: the gradients of the keys and values of a slice come from
the backwards of all later slices. So its warm-up is that of 1F1B, in slices, and k - 1 slices longer.

Bubble: (P - 1) / (M k + P - 1) for k slices of equal time; makespan (M k + P - 1)(tF + tB)/k.
Memory: stage s holds at most min(P - 1 - s + k, M k) slices in flight: P - 1 + k slices, or 1 + (P - 1)/k micro-batches on the first device,
where 1F1B holds P micro-batches.
When: sequences are long, and few micro-batches fit.

With n_slices=1 it is 1F1B.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", 2024 (arXiv 2406.03488),
section 3.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import (
    DEFAULT_SLICES,
    action_queue,
    chain_after,
    in_slices,
    loop,
    merge_queues,
)

__all__ = ["build_seq1f1b"]


def build_seq1f1b(n_stages: int, n_microbatches: int, n_devices: int, n_slices: int = DEFAULT_SLICES) -> Schedule:
    """Return Seq1F1B with one stage per device and `n_slices` slices per micro-batch."""
    rows = []
    for stage, later in enumerate(chain_after(n_stages)):
        queues = {kind: in_slices(action_queue(stage, kind, n_microbatches), n_slices) for kind in "FB"}
        rows.append(merge_queues(queues, ("F", later + n_slices - 1), ("F B",)))
    placement = loop(n_stages, n_devices)
    return Schedule(n_stages, n_microbatches, placement, tuple(rows), "seq1f1b", n_slices=n_slices)
