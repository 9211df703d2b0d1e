"""Verifier of directions: each places all stages, and each micro-batch runs in one of them.

placement 0 1      directions: devices 1 0, micro-batches 1 3         fault: devices 1 0, micro-batches 3 3, or 9 of 4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipecompile.ir import SHARDING, Schedule
from pipecompile.ir.directions import placement_of
from pipecompile.text.units import counted

__all__ = ["direction_faults", "place_faults"]


def direction_faults(schedule: Schedule) -> Iterator[str]:
    """Yield the faults of the directions of a schedule, whose other counts must be right."""
    yield from _placement_faults(schedule)
    counts = Counter(m for direction in schedule.directions for m in direction.microbatches)
    for microbatch, count in counts.items():
        if not 0 <= microbatch < schedule.n_microbatches:
            yield f"a direction has micro-batch {microbatch}, micro-batches are 0 to {schedule.n_microbatches - 1}"
        if count > 1:
            yield f"micro-batch {microbatch} is in directions {count} times, once is right"
    if schedule.directions and schedule.n_slices > 1:
        yield f"{schedule.n_slices} slices per micro-batch: a schedule of slices has one copy of each stage"
    if schedule.directions and any(action.kind in SHARDING for row in schedule.rows for action in row):
        yield "parameters are sharded by actions of a stage, and the stage has several copies"


def _placement_faults(schedule: Schedule) -> Iterator[str]:
    for number, direction in enumerate(schedule.directions, 1):
        placed = len(direction.placement)
        if placed != schedule.n_stages:
            yield f"direction {number} places {counted(placed, 'stage')}, there are {schedule.n_stages}"
        for stage, device in enumerate(direction.placement):
            if not 0 <= device < schedule.n_devices:
                yield f"direction {number} puts stage {stage} on device {device}, devices are 0 to {schedule.n_devices - 1}"
        if {*direction.placement} != {*schedule.placement}:
            yield f"direction {number} has the stages on devices {sorted({*direction.placement})}, not {sorted({*schedule.placement})}"
        if not direction.microbatches:
            yield f"direction {number} has no micro-batch"


def place_faults(schedule: Schedule) -> Iterator[str]:
    """Yield the actions that are on another device than their stage, in the direction of their micro-batch."""
    placement, moved = schedule.placement, placement_of(schedule)
    for device, row in enumerate(schedule.rows):
        for action in row:
            home = moved.get(action.microbatch, placement)[action.stage]
            if home != device:
                of = f" for micro-batch {action.microbatch}" if moved else ""
                yield f"{action} is on device {device}, stage {action.stage} is placed on device {home}{of}"
