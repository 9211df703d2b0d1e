"""Choices of the stages to recompute, for a search with `checkpoint="auto"`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.errors import ScheduleError
from pipecompile.schedules.search.priority_rules import needed_in_flight
from pipecompile.schedules.search.workload import Workload
from pipecompile.text.shown_value import shown

__all__ = ["recompute_flag_sets"]

_STRETCH = (1.0, 1.5, 2.0, 3.0)
"""Multiples of the needed micro-batches in flight for which "auto" makes room."""

_HALVINGS = 50
"""Bisection steps on the memory of one micro-batch."""


def recompute_flag_sets(
    workload: Workload, capacity: Sequence[float], checkpoint: str | Sequence[bool]
) -> Iterator[tuple[bool, ...]]:
    """Yield the sets of stages to try, as a flag per stage.

    "auto" yields no stage, then the fewest stages that make room for each of `_STRETCH`, then those with which one micro-batch alone
    holds the least, then all stages. Of the stages of a device, those that free the most bytes per second of recomputation come first.
    Other modes yield one set. Raises ScheduleError for an unknown mode.
    """
    none, every = (False,) * workload.n_stages, (True,) * workload.n_stages
    mode = checkpoint if isinstance(checkpoint, str) else ""
    if mode == "never":
        yield none
    elif mode == "always":
        yield every
    elif mode == "auto":
        needed = (_needed(workload, capacity, stretch) for stretch in _STRETCH)
        yield from dict.fromkeys([none, *needed, _least(workload), every])
    elif not isinstance(checkpoint, list | tuple) or len(checkpoint) != workload.n_stages:
        raise ScheduleError(
            f"checkpoint={shown(checkpoint)} is not known", hint="'never', 'always', 'auto', or a flag per stage"
        )
    else:
        yield tuple(map(bool, checkpoint))


def _needed(workload: Workload, capacity: Sequence[float], stretch: float) -> tuple[bool, ...]:
    """Return the fewest stages whose recomputation makes room for `stretch` times the needed micro-batches in flight."""
    flags, saved, recipe = [False] * workload.n_stages, workload.saved, workload.recipe
    for device in range(workload.n_devices):
        own = [s for s in range(workload.n_stages) if workload.placement[s] == device]
        by_gain = sorted(own, key=lambda s: (recipe[s] - saved[s]) / max(workload.recompute[s], 1e-300))
        for stage in by_gain:
            counts = needed_in_flight(replace(workload, is_recomputed=tuple(flags)))
            needed = sum(-(-stretch * counts[s] // 1) * (recipe[s] if flags[s] else saved[s]) for s in own)
            if needed + max((saved[s] for s in own if flags[s]), default=0.0) <= capacity[device]:
                break
            flags[stage] = True
    return tuple(flags)


def _least(workload: Workload) -> tuple[bool, ...]:
    """Return the stages to recompute with which one micro-batch alone holds the least on each device. To recompute all may take more:
    what R restores stands beside what the forwards before it kept.
    """
    flags = [False] * workload.n_stages
    for device in range(workload.n_devices):
        own = [s for s in range(workload.n_stages) if workload.placement[s] == device]
        low, high = 0.0, sum(workload.saved[s] for s in own)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if _within(workload, own, middle) is None else (low, middle)
        for stage in _within(workload, own, high) or ():
            flags[stage] = True
    return tuple(flags)


def _within(workload: Workload, own: Sequence[int], most: float) -> list[int] | None:
    """Return stages of a device to recompute so that one micro-batch holds at most `most` at any time; None if no stages do.

    From the first stage on, each that can be recomputed within `most` is, unless it is the last: what is kept stays least.
    """
    kept, chosen = 0.0, list[int]()
    for stage in own:
        saved, recipe = workload.saved[stage], workload.recipe[stage]
        if recipe < saved and kept + recipe + saved <= most and stage != own[-1]:
            chosen.append(stage)
            kept += recipe
        elif kept + saved <= most:
            kept += saved
        else:
            return None
    return chosen
