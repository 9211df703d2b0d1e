"""Random schedules with several copies of each stage: two or three directions over the same devices, and actions in any legal order."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.ir.directions import Direction

__all__ = ["random_copies", "redirected"]


def random_copies(rng: Random) -> Schedule:
    """A schedule of up to four stages; backwards are split or not, and several stages may share a device."""
    n_stages, n_microbatches = rng.randint(2, 4), rng.randint(2, 4)
    n_devices, is_split = rng.randint(2, n_stages), rng.random() < 0.4
    base = [*range(n_devices), *(rng.randrange(n_devices) for _ in range(n_stages - n_devices))]
    placements = [tuple(rng.sample(base, n_stages)) for _ in range(rng.randint(2, 3))]
    of = [placements[0], *(rng.choice(placements) for _ in range(n_microbatches - 1))]
    kinds = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if is_split else (Kind.FORWARD, Kind.BACKWARD)
    left = [Action(s, kind, m) for s, kind, m in product(range(n_stages), kinds, range(n_microbatches))]
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    while left:
        action = rng.choice([one for one in left if not any(need in left for need in _needs(one, n_stages))])
        left.remove(action)
        rows[of[action.microbatch][action.stage]].append(action)
    return Schedule.from_rows(rows)


def _needs(action: Action, n_stages: int) -> list[Action]:
    s, kind, m = action.stage, action.kind, action.microbatch
    match kind:
        case Kind.FORWARD:
            return [Action(s - 1, kind, m)] if s else []
        case Kind.WEIGHT_GRAD:
            return [Action(s, Kind.INPUT_GRAD, m)]
        case _:
            return [Action(s, Kind.FORWARD, m), *([Action(s + 1, kind, m)] if s + 1 < n_stages else [])]


def redirected(rng: Random, directions: tuple[Direction, ...], n_microbatches: int) -> tuple[Direction, ...]:
    """The directions with one micro-batch more, fewer or doubled in one of them, or with two stages of one exchanged."""
    if not directions:
        return directions
    index = rng.randrange(len(directions))
    one = directions[index]
    placement, own = list(one.placement), list(one.microbatches)
    if rng.random() < 0.3:
        a, b = rng.sample(range(len(placement)), 2)
        placement[a], placement[b] = placement[b], placement[a]
    elif rng.random() < 0.5 and len(own) > 1:
        own.pop(rng.randrange(len(own)))
    else:
        own.append(rng.randrange(n_microbatches))
    changed = replace(one, placement=tuple(placement), microbatches=tuple(own))
    return (*directions[:index], changed, *directions[index + 1 :])
