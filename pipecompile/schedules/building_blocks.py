"""Building blocks of schedules: rows, merged from queues of actions phase by phase, and placements of stages on devices.

    queues   F: 0F0 0F1 0F2      B: 0B0 0B1 0B2
    phases   ("F", 1), ("F B",)              one forward; then F, B in turn until both queues are empty
    row      0F0  0F1 0B0  0F2 0B1  0B2

A queue is an ordered list of actions. A phase is a pattern of queue names and the number of its repetitions; in each repetition
every named queue yields its next action, and an empty queue is skipped.

    stage    0 1 2 3 4 5 6 7
    device   0 1 2 3 0 1 2 3      loop, 4 devices: stages go to the devices in turn
    device   0 1 2 3 3 2 1 0      vee, 4 devices: the first device also has the last stage, no transfer at the bottom
    device   0 1 1 0 0 1 1 0      zigzag, 2 devices: to and fro, no transfer at the turns
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from pipecompile.errors import ScheduleError
from pipecompile.ir import Action, Kind, Schedule
from pipecompile.text.shown_value import shown

__all__ = [
    "DEFAULT_SLICES",
    "action_queue",
    "action_queues",
    "chain_after",
    "check_cells",
    "in_slices",
    "loop",
    "merge_queues",
    "serial",
    "vee",
    "zigzag",
]

DEFAULT_SLICES = 4
"""Slices per micro-batch of the schedules that have slices."""

_MOST_CELLS = 50_000_000
"""Cells of a schedule, one per stage and micro-batch or slice."""

Phase = tuple[str] | tuple[str, int]
"""A pattern and its number of repetitions; without a number it repeats until its queues are empty."""


def action_queue(stage: int, kind: str, n_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of one kind and stage on all micro-batches, in ascending order."""
    of_kind = Kind(kind)
    return tuple([Action(stage, of_kind, m) for m in range(n_microbatches)])


def action_queues(stages: Sequence[int], kinds: str, n_microbatches: int) -> dict[str, tuple[Action, ...]]:
    """Return a queue per kind and stage. Names are "F", "I" ... for one stage, else "F0", "F1" ... by the index in `stages`."""
    single = len(stages) == 1
    return {
        kind if single else f"{kind}{chunk}": action_queue(stage, kind, n_microbatches)
        for chunk, stage in enumerate(stages)
        for kind in kinds
    }


def in_slices(actions: Iterable[Action], n_slices: int) -> tuple[Action, ...]:
    """Return the actions, each divided into its slices: forwards in the order of the sequence, and backwards against it."""
    if n_slices == 1:
        return tuple(actions)
    there, back = range(n_slices), range(n_slices)[::-1]
    return tuple(
        replace(action, slice=place) for action in actions for place in (there if action.kind is Kind.FORWARD else back)
    )


def merge_queues(queues: Mapping[str, Iterable[Action]], *phases: Phase) -> tuple[Action, ...]:
    """Return the row with every action of the queues once, in the order of the phases. Linear in the number of actions."""
    remaining = {name: iter(actions) for name, actions in queues.items()}
    row: list[Action] = []
    for pattern, *times in phases:
        names = pattern.split()
        for _ in range(times[0]) if times else count():
            actions = [action for name in names if (action := next(remaining[name], None)) is not None]
            if not actions:
                break
            row += actions
    assert all(next(actions, None) is None for actions in remaining.values()), "the phases do not empty all queues"
    return tuple(row)


def chain_after(n_stages: int) -> tuple[int, ...]:
    """Return the number of stages after each stage of a chain."""
    return tuple(range(n_stages - 1, -1, -1))


def loop(n_stages: int, n_devices: int) -> tuple[int, ...]:
    """Return the device of each stage, `s mod n_devices`."""
    return tuple(stage % n_devices for stage in range(n_stages))


def vee(n_devices: int) -> tuple[int, ...]:
    """Return the device of each of 2 * n_devices stages: device d has stages d and 2 * n_devices - 1 - d."""
    return (*range(n_devices), *reversed(range(n_devices)))


def zigzag(n_stages: int, n_devices: int) -> tuple[int, ...]:
    """Return the device of each stage, in waves: to the last device, back to the first, and so on."""
    there = range(n_devices)
    ways = (there if turn % 2 == 0 else reversed(there) for turn in range(n_stages // n_devices))
    return tuple(device for way in ways for device in way)


def check_cells(n_stages: int, n_microbatches: int, n_slices: int = 1) -> None:
    """Raise ScheduleError for counts of stages, micro-batches and slices whose schedule memory cannot hold."""
    if n_stages * n_microbatches * n_slices > _MOST_CELLS:
        of_slices = "" if n_slices == 1 else f" of {_grouped(n_slices)} slices"
        raise ScheduleError(
            f"a schedule has at most {_MOST_CELLS:,} cells",
            why=f"{_grouped(n_stages)} stages on {_grouped(n_microbatches)} micro-batches{of_slices} are asked for",
        )


def _grouped(count: int) -> str:
    return f"{count:,}" if count < 10**18 else shown(count)


def serial(placement: Sequence[int], n_microbatches: int) -> Schedule:
    """Return the schedule that runs one micro-batch after another: no schedule needs less memory."""
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for m in range(n_microbatches):
        for stage, device in enumerate(placement):
            rows[device].append(Action(stage, Kind.FORWARD, m))
        for stage, device in reversed(list(enumerate(placement))):
            rows[device].append(Action(stage, Kind.BACKWARD, m))
    return Schedule(len(placement), n_microbatches, tuple(placement), tuple(map(tuple, rows)), "serial")
