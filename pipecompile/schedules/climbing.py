"""Climb from a taste: change it a little at random, keep what is no slower.

Where memory is tight, how many forwards of which stage may wait decides more than anything, and no formula knows the best
numbers. The random numbers are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from pipecompile.schedules.search.list_scheduling import Listed, Taste, list_schedule
from pipecompile.schedules.search.workload import Work

__all__ = ["climbed"]

_NEGLIGIBLE, _ENOUGH = 1e-9, 150


def climbed(
    work: Work, n_microbatches: int, room: Sequence[float], start: tuple[Taste, Listed], *, target: float, runs: int
) -> Listed:
    """The fastest list schedule that is found; stops at `target` seconds, after so many runs, or when nothing helps."""
    rng, failures = Random(0), 0
    taste, best = start
    taste = replace(taste, in_flight=tuple(min(count, n_microbatches) for count in taste.in_flight))
    for _ in range(runs):
        if best.seconds <= target * (1 + _NEGLIGIBLE) or failures > _ENOUGH:
            break
        other = _neighbour(taste, n_microbatches, rng)
        listed = list_schedule(work, n_microbatches, room, other)
        failures += 1
        if listed is not None and listed.seconds <= best.seconds:
            failures *= listed.seconds > best.seconds * (1 - _NEGLIGIBLE)
            taste, best = other, listed
    return best


def _neighbour(taste: Taste, n_microbatches: int, rng: Random) -> Taste:
    """Other quotas for up to three stages, or another urgency for one."""
    stage = rng.randrange(len(taste.in_flight))
    if rng.random() < 0.5:
        quotas = list(taste.in_flight)
        for _ in range(rng.randint(1, 3)):
            quotas[stage] = max(1, min(n_microbatches, quotas[stage] + rng.choice((-2, -1, 1, 2))))
            stage = rng.randrange(len(quotas))
        return replace(taste, in_flight=tuple(quotas))
    forward = rng.random() < 0.5
    ranks = list(taste.forward if forward else taste.backward)
    ranks[stage] += rng.uniform(-3, 3) * rng.choice((1, 1e3, 1e6))
    return replace(taste, forward=tuple(ranks)) if forward else replace(taste, backward=tuple(ranks))
