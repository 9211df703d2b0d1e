"""Verifier of unrolled periodic schedules by arrays: it tells whether a schedule is legal, in a few operations per row, not per action.

The conditions are those of `schedule_faults`, for schedules without sharded parameters. A schedule that is not legal, or has something
else, is left to `schedule_faults`, which names the faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import SHARDING, Kind, Route
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.program_arrays import KINDS, unrolled_actions
from pipecompile.verifiers.schedule import schedule_needs

__all__ = ["Waits", "waits_of_legal"]

Ints = NDArray[np.int64]

_KINDS = tuple(kind for kind in Kind if kind not in SHARDING)


def waits_of_legal(schedule: PeriodicSchedule, routes: Sequence[Route], count: int) -> Waits | None:
    """Return what the actions of `count` repetitions wait for if they are a legal schedule; None if not, or if arrays cannot say so."""
    n_stages, rows = schedule.n_stages, unrolled_actions(schedule, count)
    m = schedule.n_microbatches + schedule.step * (count - schedule.repetitions)
    stages, kinds, microbatches = np.concatenate(rows, axis=1)
    if not len(stages) or min(n_stages, m) < 1 or len(schedule.placement) != n_stages:
        return None
    if min(stages.min(), microbatches.min()) < 0 or stages.max() >= n_stages or microbatches.max() >= m:
        return None
    lengths = [row.shape[1] for row in rows]
    if (np.array(schedule.placement)[stages] != np.repeat(np.arange(len(rows)), lengths)).any():
        return None
    cells = stages * m + microbatches
    if not _are_right_cells(cells, kinds, n_stages * m):
        return None
    at = np.full((len(KINDS), n_stages * m), -1)
    at[kinds, cells] = np.arange(len(cells))
    starts = np.cumsum([0, *lengths])
    waits = Waits.of(list(_needs(schedule, routes, stages, kinds, cells, at, m)), starts)
    return waits if waits is not None and waits.end() else None


def _are_right_cells(cells: Ints, kinds: Ints, n_cells: int) -> bool:
    """Return whether each cell has the right actions, each once."""
    f, b, i, w, r, out, back = (np.bincount(cells[kinds == KINDS[kind]], minlength=n_cells) for kind in _KINDS)
    is_trained = bool((kinds != KINDS[Kind.FORWARD]).any())
    is_right = (f == 1) & (b + i == is_trained) & (i == w) & (r + out <= b + i) & (out == back)
    return bool(is_right.all())


def _needs(
    schedule: PeriodicSchedule, routes: Sequence[Route], stages: Ints, kinds: Ints, cells: Ints, at: Ints, m: int
) -> Iterator[tuple[Ints, Ints]]:
    """Yield (actions, the actions that they need), by the stage and the kind of both."""
    needs = schedule_needs(schedule.n_stages, routes, schedule.kinds)
    order = np.lexsort((kinds, stages))
    bounds = np.searchsorted((stages * len(KINDS) + kinds)[order], np.arange(schedule.n_stages * len(KINDS) + 1))
    for stage, of_stage in enumerate(needs):
        for kind, cells_needed in of_stage.items():
            number = stage * len(KINDS) + KINDS[kind]
            own = order[bounds[number] : bounds[number + 1]]
            for other, needed_kind in cells_needed if len(own) else ():
                if not 0 <= other < schedule.n_stages:
                    continue
                needed = at[KINDS[needed_kind], cells[own] + (other - stage) * m]
                yield own[needed >= 0], needed[needed >= 0]


@dataclass(frozen=True, slots=True)
class Waits:
    """The actions of all rows, one after the other; those of a device begin at `starts`. `needs` has, per action, the actions of other
    devices that it waits for, shape (actions, most of an action), -1 for none.
    """

    starts: Ints
    needs: Ints

    @classmethod
    def of(cls, pairs: Sequence[tuple[Ints, Ints]], starts: Ints) -> Waits | None:
        """Return the waits of actions for others; None if one is not after those of its own device."""
        none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        own, needed = (np.concatenate(column) for column in zip(none, *pairs, strict=True))
        device, other = (np.searchsorted(starts, each, side="right") for each in (own, needed))
        if ((device == other) & (needed >= own)).any():
            return None
        own, needed = own[device != other], needed[device != other]
        order = np.argsort(own, kind="stable")
        own, needed = own[order], needed[order]
        place = np.arange(len(own)) - np.searchsorted(own, own)
        needs = np.full((int(starts[-1]), int(place.max(initial=0)) + 1), -1)
        needs[own, place] = needed
        return cls(starts, needs)

    def end(self) -> bool:
        """Return whether all rows come to their ends."""
        position, is_done = self.starts[:-1].copy(), np.zeros(int(self.starts[-1]) + 1, dtype=bool)
        is_done[-1] = True
        devices = np.flatnonzero(position < self.starts[1:])
        while len(devices):
            goes_on = is_done[self.needs[position[devices]]].all(axis=1)
            if not goes_on.any():
                return False
            going = devices[goes_on]
            is_done[position[going]] = True
            position[going] += 1
            devices = devices[position[devices] < self.starts[devices + 1]]
        return True

    def closed(self, cut: Ints) -> Ints:
        """Return how many actions of each row are over at least, if those of `cut` are: with all that they wait for. Linear."""
        reached, done = cut.copy(), np.zeros_like(cut)
        while (over := reached - done).any():
            index = np.repeat(self.starts[:-1] + done - np.cumsum(over) + over, over) + np.arange(over.sum())
            done += over
            needed = self.needs[index]
            needed = needed[needed >= 0]
            device = np.searchsorted(self.starts, needed, side="right") - 1
            np.maximum.at(reached, device, needed - self.starts[device] + 1)
        return reached
