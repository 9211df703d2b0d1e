"""Rows woven of action_queues: what most schedules are made of.

    action_queues   F: 0F0 0F1 0F2      B: 0B0 0B1 0B2
    steps   ("F", 1), ("F B",)               one forward; then forward, backward, as long as there are any
    row     0F0  0F1 0B0  0F2 0B1  0B2

A action_queue is an ordered list of actions. A step is a pattern of action_queues and how often it is repeated; in each round every
action_queue gives its next action, and one that is empty is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from pipecompile.ir import Action, Kind

__all__ = ["action_queue", "action_queues", "merge_queues"]

Step = tuple[str] | tuple[str, int]
"""A pattern, repeated so many times or, without a number, until its action_queues are empty."""


def action_queue(stage: int, kind: str, n_microbatches: int) -> tuple[Action, ...]:
    """One kind of action of one stage on all micro-batches, in ascending order."""
    return tuple(Action(stage, Kind(kind), m) for m in range(n_microbatches))


def action_queues(stages: Sequence[int], kinds: str, n_microbatches: int) -> dict[str, tuple[Action, ...]]:
    """A action_queue per kind and stage: "F", "I" ... when there is one stage, else "F0", "F1" ... by its place in `stages`."""
    single = len(stages) == 1
    return {
        kind if single else f"{kind}{chunk}": action_queue(stage, kind, n_microbatches)
        for chunk, stage in enumerate(stages)
        for kind in kinds
    }


def merge_queues(given: Mapping[str, Iterable[Action]], *steps: Step) -> tuple[Action, ...]:
    """The row that the steps make of the action_queues; every action is in it once. Linear."""
    left = {name: iter(actions) for name, actions in given.items()}
    row: list[Action] = []
    for pattern, *times in steps:
        names = pattern.split()
        for _ in range(times[0]) if times else count():
            taken = [action for name in names if (action := next(left[name], None)) is not None]
            if not taken:
                break
            row += taken
    assert all(next(actions, None) is None for actions in left.values()), "the steps leave actions over"
    return tuple(row)
