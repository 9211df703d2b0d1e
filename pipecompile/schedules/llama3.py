"""Interleaved 1F1B with rounds of 2 P micro-batches: between `interleaved`, with rounds of P, and `looped-bfs`, with one round of M.

    device 0 │ F0 F1 F2 F3 f0 f1 f2    b0 b0 f3 b1 b1 F4 b2 b2 F5 b3 b3 F6 B0 B0 F7 B1 B1 f4 B2 B2 f5 B3 B3 f6 b4 b4 f7 b5 b5    b6 b6    b7 b7 B4 B4 B5 B5 B6 B6 B7 B7
    device 1 │    F0 F1 F2 F3 f0 b0 b0 f1 b1 b1 f2 b2 b2 f3 b3 b3 F4 B0 B0 F5 B1 B1 F6 B2 B2 F7 B3 B3 f4 b4 b4 f5 b5 b5 f6 b6 b6 f7 b7 b7 B4 B4 B5 B5 B6 B6 B7 B7
             └──────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 8

A value that enters the next stage of the first device has the time of P more forwards to arrive.

Bubble: as `interleaved`, makespan M T + (P - 1)(tF + tB)/v for M >= P.
Memory: ((v - 1) R + 2 (P - d) - 1) / v micro-batches on device d; R is the length of the longest round, 2 P if 2 P divides M.
When: as `interleaved`, with slower links and more memory.

Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2: the number of contiguous micro-batches is free there; here it is
2 P.
"""

from __future__ import annotations

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.interleaved import interleaved_rows
from pipecompile.schedules.rounds import microbatch_rounds

__all__ = ["build_llama3"]


def build_llama3(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches and stages per device; `n_devices` must divide `n_stages`."""
    rows = interleaved_rows(n_stages, n_devices, microbatch_rounds(n_microbatches, 2 * n_devices))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "llama3")
