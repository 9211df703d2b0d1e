"""Directions: further copies of all stages, each with a placement and micro-batches of its own (Chimera).

    placement        stages 0 1 on devices 0 1      micro-batches 0 2      0F0 runs on device 0
    directions[0]    stages 0 1 on devices 1 0      micro-batches 1 3      0F1 runs on device 1

A micro-batch runs all stages in one direction, and all directions have the same devices. The copies of a stage have the same
parameters, and their gradients are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from pipecompile.errors import ScheduleError
from pipecompile.ir.action import NO_MICROBATCH, SHARDING, Action
from pipecompile.text.shown_value import shown

__all__ = [
    "Direction", "Placement", "all_placements", "check_one_direction", "copies_placed", "directions_fault", "found_directions", "placement_of",
    "stage_devices", "stages_on",
]  # fmt: skip

Placement = tuple[int, ...]
"""The device of each stage."""


@dataclass(frozen=True, slots=True)
class Direction:
    """A copy of all stages: stage s is on device `placement[s]`, for these micro-batches in ascending order."""

    placement: Placement
    microbatches: tuple[int, ...]

    def __str__(self) -> str:
        devices, own = ("".join(f" {one}" for one in numbers) for numbers in (self.placement, self.microbatches))
        return f"direction: devices{devices}, micro-batches{own}"


class _Placed(Protocol):
    """A Schedule or a Program."""

    @property
    def placement(self) -> Placement: ...
    @property
    def directions(self) -> tuple[Direction, ...]: ...
    @property
    def n_microbatches(self) -> int: ...


def all_placements(subject: _Placed) -> tuple[Placement, ...]:
    """Return the placements of all directions, that of `subject.placement` first."""
    return (subject.placement, *(direction.placement for direction in subject.directions))


def placement_of(subject: _Placed) -> Mapping[int, Placement]:
    """Return the placement of each micro-batch of a direction; what the mapping lacks has `subject.placement`."""
    return {m: direction.placement for direction in subject.directions for m in direction.microbatches}


def copies_placed(subject: _Placed) -> Placement:
    """Return the devices of all copies of all stages."""
    return tuple(chain.from_iterable(stage_devices(subject)))


def stage_devices(subject: _Placed) -> list[Placement]:
    """Return, per stage, the devices of its copies, that of `subject.placement` first."""
    return [tuple(dict.fromkeys(own)) for own in zip(*all_placements(subject), strict=False)]


def stages_on(subject: _Placed, n_devices: int) -> list[list[int]]:
    """Return, per device, the stages of which it has a copy."""
    pairs = {(device, stage) for placement in all_placements(subject) for stage, device in enumerate(placement)}
    return [sorted(stage for own, stage in pairs if own == device) for device in range(n_devices)]


def directions_fault(directions: object) -> str:
    """Return what is wrong with directions as data; empty if nothing is."""
    is_right = isinstance(directions, tuple) and all(map(_is_direction, directions))
    return (
        "" if is_right else f"directions is {shown(directions)}, not a tuple of Direction with tuples of whole numbers"
    )


def _is_direction(one: object) -> bool:
    if not isinstance(one, Direction) or not all(isinstance(part, tuple) for part in (one.placement, one.microbatches)):
        return False
    return all(type(number) is int for number in (*one.placement, *one.microbatches))


def check_one_direction(
    subject: Any, what: str, hint: str = 'pc.build_schedule("1f1b", n_stages, n_microbatches)'
) -> None:
    """Raise ScheduleError for a schedule with several copies of its stages, which `what` does not support."""
    if subject.directions:
        name = shown(subject.name) if hasattr(subject, "name") else "the program"
        raise ScheduleError(
            f"{name} has {len(subject.directions) + 1} copies of each stage, and {what}",
            why=f"micro-batches of the second one run on devices {subject.directions[0].placement}",
            hint=hint,
        )


def found_directions(rows: Sequence[Sequence[Action]], n_stages: int) -> tuple[Direction, ...] | None:
    """Return the directions of the micro-batches of these rows beside that of the first one. None if a cell is on two devices, if
    directions have other devices, or if a micro-batch lacks a stage while stages have copies.
    """
    device_of: dict[tuple[int, int], int] = {}
    for device, row in enumerate(rows):
        for action in row:
            is_whole = action.kind in SHARDING or action.microbatch == NO_MICROBATCH
            if is_whole or device_of.setdefault((action.microbatch, action.stage), device) != device:
                return None
    microbatches = sorted({microbatch for microbatch, _ in device_of})
    if len(device_of) != len(microbatches) * n_stages:
        return None
    found: dict[Placement, list[int]] = {}
    for microbatch in microbatches:
        placement = tuple(device_of[microbatch, stage] for stage in range(n_stages))
        found.setdefault(placement, []).append(microbatch)
    if len({frozenset(placement) for placement in found}) > 1:
        return None  # on other devices it is a copy of the pipeline, or a mistake
    return tuple(Direction(placement, tuple(own)) for placement, own in found.items())[1:]
