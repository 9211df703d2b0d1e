"""TeraPipe: GPipe on slices of micro-batches along the sequence, for causal models: all forwards, then all backwards.

    device 0 │ F0.0 F0.1 F1.0 F1.1                               B0.1 B0.1 B0.0 B0.0 B1.1 B1.1 B1.0 B1.0
    device 1 │      F0.0 F0.1 F1.0 F1.1                B0.1 B0.1 B0.0 B0.0 B1.1 B1.1 B1.0 B1.0
    device 2 │           F0.0 F0.1 F1.0 F1.1 B0.1 B0.1 B0.0 B0.0 B1.1 B1.1 B1.0 B1.0
             └──────────────────────────────────────────────────────────────────────▶ time    P = 3, M = 2, k = 2 slices, B twice as long as F

Bubble: (P - 1) / (M k + P - 1) for k slices of equal time; makespan (M k + P - 1)(tF + tB)/k.
Memory: every device holds all M micro-batches in flight.
When: as `gpipe`, where sequences are long: k slices have the bubble of k times the micro-batches. `seq1f1b` has it in less memory.

With n_slices=1 it is GPipe, and with several stages on a device the order is breadth-first, as in `looped-bfs`. The paper chooses the
lengths of the slices by dynamic programming: `simulate(slice_seconds=, slice_bytes=)` takes any.

Li et al., "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models", ICML 2021 (arXiv 2102.07988).
"""

from __future__ import annotations

from dataclasses import replace

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import DEFAULT_SLICES, in_slices
from pipecompile.schedules.looped_bfs import build_looped_bfs

__all__ = ["build_terapipe"]


def build_terapipe(n_stages: int, n_microbatches: int, n_devices: int, n_slices: int = DEFAULT_SLICES) -> Schedule:
    """Return TeraPipe for any number of micro-batches, with `n_slices` slices each; `n_devices` must divide `n_stages`."""
    whole = build_looped_bfs(n_stages, n_microbatches, n_devices)
    rows = tuple(in_slices(row, n_slices) for row in whole.rows)
    return replace(whole, rows=rows, name="terapipe", n_slices=n_slices)
