"""Seq1F1B-I: interleaved 1F1B on slices of micro-batches along the sequence, for causal models.

    device 0 │ F0.0 F0.1 f0.0 f0.1 F1.0 F1.1      b0.1 b0.1 f1.0 b0.0 b0.0 f1.1 B0.1 B0.1      B0.0 B0.0      b1.1 b1.1 b1.0 b1.0 B1.1 B1.1 B1.0 B1.0
    device 1 │      F0.0 F0.1 f0.0 f0.1 b0.1 b0.1 F1.0 b0.0 b0.0 F1.1 B0.1 B0.1 f1.0 B0.0 B0.0 f1.1 b1.1 b1.1 b1.0 b1.0 B1.1 B1.1 B1.0 B1.0
             └──────────────────────────────────────────────────────────────────────▶ time    4 stages on P = 2, M = 2, k = 2 slices; small letters: the device's second stage

Rounds have as few micro-batches as have P slices, so with k >= P slices a round is one micro-batch: that is the order of SlimPipe.

Bubble: makespan M T + (P - 1)(tF + tB)/(v k) for M k >= P slices of equal time, with T = tF + tB of all stages of a device.
Memory: ((v - 1) R + k + 2 (P - 1 - d)) / (v k) micro-batches on device d; R is the number of slices in the longest round. With k = R = n P it is
1 + 2 (P - 1 - d) / (v k) micro-batches, each a P-th of the model's layers.
When: as `seq1f1b`, with links that are fast enough for v times the messages.

With n_slices=1 it is `interleaved`.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", 2024 (arXiv 2406.03488);
Li et al., "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism for Long-Context LLM Training", 2025 (arXiv 2504.14519), which
also evens out the attention of unequal slices between devices; here slices keep their seconds.
"""

from __future__ import annotations

from pipecompile.ir import Action, Schedule
from pipecompile.schedules.building_blocks import DEFAULT_SLICES, in_slices, loop, merge_queues
from pipecompile.schedules.rounds import depth_first, microbatch_rounds

__all__ = ["build_seq1f1b_interleaved"]


def build_seq1f1b_interleaved(
    n_stages: int, n_microbatches: int, n_devices: int, n_slices: int = DEFAULT_SLICES
) -> Schedule:
    """Return Seq1F1B-I for any number of micro-batches and stages per device; `n_devices` must divide `n_stages`."""
    rounds = microbatch_rounds(n_microbatches, -(-n_devices // n_slices))
    rows = tuple(_row(range(device, n_stages, n_devices), rounds, n_stages, n_slices) for device in range(n_devices))
    placement = loop(n_stages, n_devices)
    return Schedule(n_stages, n_microbatches, placement, rows, "seq1f1b-interleaved", n_slices=n_slices)


def _row(stages: range, rounds: tuple[range, ...], n_stages: int, n_slices: int) -> tuple[Action, ...]:
    """Return the row of a device. The warm-up is that of `interleaved` in slices, and n_slices - 1 slices longer."""
    hops = n_stages - 1 - stages[-1]
    first_round = (len(stages) - 1) * len(rounds[0]) * n_slices
    warmup = first_round + (2 * hops if len(stages) > 1 else hops) + n_slices - 1
    queues = {
        "F": in_slices(depth_first(stages, "F", rounds), n_slices),
        "B": in_slices(depth_first(stages[::-1], "B", rounds), n_slices),
    }
    return merge_queues(queues, ("F", warmup), ("F B",))
