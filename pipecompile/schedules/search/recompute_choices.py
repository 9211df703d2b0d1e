"""Which stages to recompute, when a search may choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.errors import ScheduleError
from pipecompile.schedules.search.priority_rules import periods
from pipecompile.schedules.search.workload import Work

__all__ = ["flag_sets"]

_STRETCH = (1.0, 1.5, 2.0, 3.0)


def flag_sets(work: Work, room: Sequence[float], checkpoint: str | Sequence[bool]) -> Iterator[tuple[bool, ...]]:
    """A flag per stage: as told, or with "auto" none, those that have to be for few or more micro-batches, and all.

    Of the stages of a device those go first that give back the most bytes per second of recomputation. Raises
    ScheduleError for a mode that is none.
    """
    none, every = (False,) * work.n_stages, (True,) * work.n_stages
    if checkpoint == "never":
        yield none
    elif checkpoint == "always":
        yield every
    elif checkpoint == "auto":
        found = dict.fromkeys([none, *(_needed(work, room, stretch) for stretch in _STRETCH), every])
        yield from found
    elif isinstance(checkpoint, str) or len(checkpoint) != work.n_stages:
        raise ScheduleError(
            f"checkpoint={checkpoint!r} is not known", hint="'never', 'always', 'auto', or a flag per stage"
        )
    else:
        yield tuple(map(bool, checkpoint))


def _needed(work: Work, room: Sequence[float], stretch: float) -> tuple[bool, ...]:
    """The fewest stages whose recomputation makes room for `stretch` times the micro-batches that have to be in flight."""
    flags = [False] * work.n_stages
    for device in range(work.n_devices):
        own = [s for s in range(work.n_stages) if work.placement[s] == device]
        worth = sorted(own, key=lambda s: (work.kept[s] - work.saved[s]) / max(work.recompute[s], 1e-300))
        for stage in worth:
            counts = periods(replace(work, again=tuple(flags)))
            needed = sum(-(-stretch * counts[s] // 1) * (work.kept[s] if flags[s] else work.saved[s]) for s in own)
            if needed + max((work.saved[s] for s in own if flags[s]), default=0.0) <= room[device]:
                break
            flags[stage] = True
    return tuple(flags)
