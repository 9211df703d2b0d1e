"""Rounds of micro-batches: interleaved schedules run a round through all stages of a device before the next round.

    M = 8, P = 4      0 1 2 3 │ 4 5 6 7            forward of 2 stages: 0F0..0F3 4F0..4F3 │ 0F4..0F7 4F4..4F7
    M = 11, P = 4     0 1 2 3 4 5 │ 6 7 8 9 10     backward: 4B0..4B3 0B0..0B3 │ ...

A round shorter than P makes devices wait, so there are M div P rounds, of equal length or differing by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.ir import Action, Kind

__all__ = ["depth_first", "microbatch_rounds"]


def microbatch_rounds(n_microbatches: int, n_devices: int) -> tuple[range, ...]:
    """Return the micro-batches in ascending order, in rounds of at least `n_devices` if there are as many; longer rounds first."""
    number = max(1, n_microbatches // n_devices)
    size, longer = divmod(n_microbatches, number)
    starts = [index * size + min(index, longer) for index in range(number + 1)]
    return tuple(range(start, stop) for start, stop in zip(starts, starts[1:], strict=False))


def depth_first(stages: Sequence[int], kind: str, rounds: Sequence[range]) -> tuple[Action, ...]:
    """Return the actions round by round, in each round stage by stage in the order of `stages`."""
    return tuple(Action(stage, Kind(kind), m) for part in rounds for stage in stages for m in part)
