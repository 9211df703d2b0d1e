"""Choices of the stages to recompute, for a search with `checkpoint="auto"`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.errors import ScheduleError
from pipecompile.ir.shown_value import shown
from pipecompile.schedules.search.priority_rules import needed_in_flight
from pipecompile.schedules.search.workload import Workload

__all__ = ["recompute_flag_sets"]

_STRETCH = (1.0, 1.5, 2.0, 3.0)
"""Multiples of the needed micro-batches in flight for which "auto" makes room."""


def recompute_flag_sets(
    workload: Workload, capacity: Sequence[float], checkpoint: str | Sequence[bool]
) -> Iterator[tuple[bool, ...]]:
    """Yield the sets of stages to try, as a flag per stage.

    "auto" yields no stage, then the fewest stages that make room for each of `_STRETCH`, then all stages. Of the stages of a
    device, those that free the most bytes per second of recomputation come first. Other modes yield one set. Raises
    ScheduleError for an unknown mode.
    """
    none, every = (False,) * workload.n_stages, (True,) * workload.n_stages
    mode = checkpoint if isinstance(checkpoint, str) else ""
    if mode == "never":
        yield none
    elif mode == "always":
        yield every
    elif mode == "auto":
        yield from dict.fromkeys([none, *(_needed(workload, capacity, stretch) for stretch in _STRETCH), every])
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
