"""1F1B (PipeDream-flush): after a warm-up, every device alternates one forward and one backward.

    device 0 │ F0 F1 F2             B0 B0 F3 B1 B1    B2 B2    B3 B3
    device 1 │    F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
    device 2 │       F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
             └─────────────────────────────────────────────────────▶ time    P = 3, M = 4, B twice as long as F
                warm-up: min(P - 1 - s, M) forwards │ pairs F B │ the remaining backwards

Bubble: (P - 1) / (M + P - 1), as GPipe; makespan (M + P - 1)(tF + tB).
Memory: stage s holds at most min(P - s, M) micro-batches in flight, so no device holds more than P. Of a DAG of stages, with h stages
on the longest path after it, min(h + 1, M): towers beside each other hold what their own depth needs.
When: by default. The time of GPipe, in memory that does not grow with M.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.2 (PipeDream-flush);
Fan et al., "DAPPLE", PPoPP 2021, has the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Schedule
from pipecompile.schedules.building_blocks import action_queues, chain_after, loop, merge_queues

__all__ = ["build_one_f_one_b"]


def build_one_f_one_b(
    n_stages: int, n_microbatches: int, n_devices: int, after: Sequence[int] | None = None
) -> Schedule:
    """Return 1F1B with one stage per device. With M < P the first stages have no steady phase. `after` is the number of stages on
    the longest path after each stage, by default that of a chain.
    """
    rows = tuple(
        merge_queues(action_queues([stage], "FB", n_microbatches), ("F", later), ("F B",))
        for stage, later in enumerate(after or chain_after(n_stages))
    )
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "1f1b")
