"""DualPipeV with overlapped cells: in the steady phase F of one stage and B of the other run at the same time.

    device 0 │ F0 F1 F2 f0 i0 w0 f1 F3+b1 b1    f2+B0 B0 F4+b2 b2 f3+B1 B1 b3 b3    f4+B2 B2 b4 b4 I3 W3 I4 W4
    device 1 │    F0 f0 F1 f1 F2 b0 b0 f2+B0 B0 F3+b1 b1 f3+B1 B1 F4+b2 b2 f4+B2 B2 b3 b3 B3 B3    i4 I4 w4 W4
             └──────────────────────────────────────────────────────────────────────────────────────────▶ time    P = 2, M = 5

`F3+b1 b1` is a pair: F3 and b1 at the same time, here drawn for pairs that hide nothing. A pair begins when what both need is there,
and its values leave when it ends. It is worth its waits where stages communicate within
themselves, as the all-to-all of experts: `simulate(..., forward_communication=, backward_communication=)`. Here, and in one process,
F runs before B.

Bubble: makespan M T + (P - 1) tF at equal times where a pair hides nothing, for M >= 2 P; each hidden second of a pair is one less.
Memory: at most P + 1/2 micro-batches in flight on every device.
When: forward and backward of experts on several nodes, whose all-to-all takes as long as their compute.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1; the pairs are those of torch's ScheduleDualPipeV.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pipecompile.ir import Kind, Schedule
from pipecompile.schedules.dualpipev import build_dualpipev

__all__ = ["build_dualpipev_overlap"]


def build_dualpipev_overlap(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return `dualpipev` in which each F overlaps with the B after it; none overlap with fewer than 2 P micro-batches."""
    schedule = build_dualpipev(n_stages, n_microbatches, n_devices)
    if n_microbatches < 2 * n_devices:
        return replace(schedule, name="dualpipev-overlap")
    overlaps = set()
    for device, row in enumerate(schedule.rows):
        pairs = [(a, b) for a, b in pairwise(row) if (a.kind, b.kind) == (Kind.FORWARD, Kind.BACKWARD)]
        overlaps.update(pairs[device == n_devices - 1 :])  # at the turn of the V, the first B may not wait for an F
    return replace(schedule, name="dualpipev-overlap", overlaps=frozenset(overlaps))
