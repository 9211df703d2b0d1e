"""1F1B that recomputes some micro-batches: each stage keeps what half of P micro-batches save, and the inputs of the others.

    device 0 │ F0 F1 F2 F3                   B0 B0 F4 B1 B1 F5 R2 B2 B2 R3 B3 B3    B4 B4    B5 B5
    device 1 │    F0 F1 F2             B0 B0 F3 B1 B1 F4 R2 B2 B2 F5 B3 B3    B4 B4 R5 B5 B5
    device 2 │       F0 F1       B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3    F5 B4 B4    B5 B5
    device 3 │          F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4    F5 B5 B5
             └──────────────────────────────────────────────────────────────▶ time    P = 4, M = 6, B twice as long as F

Stage s has P - s micro-batches in flight. Of each P - s in a row it recomputes those beyond the first (P + 1) div 2, so the last
half of the stages recomputes nothing.

Bubble: makespan between (M + P - 1)(tF + tB) of 1F1B and (M + P - 1)(tF + tB) + M tF: only the first stages recompute, and a part of
their micro-batches.
Memory: at most (P + 1) div 2 micro-batches that keep what they save, one that is restored, and the inputs of the others.
When: the first devices lack memory for 1F1B, and the last ones have some left.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, appendix on
recomputation per micro-batch.
"""

from __future__ import annotations

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.schedules.building_blocks import action_queues, chain_after, loop, merge_queues

__all__ = ["build_checkpoint_window"]


def build_checkpoint_window(n_stages: int, n_microbatches: int, n_devices: int) -> Schedule:
    """Return the schedule for any number of micro-batches, with one stage per device."""
    kept = (n_stages + 1) // 2
    rows = tuple(_row(stage, later, kept, n_microbatches) for stage, later in enumerate(chain_after(n_stages)))
    return Schedule(n_stages, n_microbatches, loop(n_stages, n_devices), rows, "checkpoint-window")


def _row(stage: int, later: int, kept: int, n_microbatches: int) -> tuple[Action, ...]:
    """Return the row of a stage with `later` stages after it, which keeps `kept` of `later` + 1 micro-batches."""
    queues = action_queues([stage], "FB", n_microbatches)
    row = merge_queues(queues, ("F", later), ("F B",))
    again = {b: Action(stage, Kind.RECOMPUTE, b.microbatch) for b in queues["B"] if b.microbatch % (later + 1) >= kept}
    return tuple(each for action in row for each in ((again[action], action) if action in again else (action,)))
