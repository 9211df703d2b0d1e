"""Periods of schedules: what a device repeats, with later micro-batches each time.

    1f1b, P = 3     F0 F1 │ F2 B0 │ F3 B1 │ F4 B2 │ ... │ B5 B6       device 0: the period is (F2 B0), one micro-batch later each time

A schedule of many micro-batches is one of few with more repetitions: `build_periodic` builds two small ones, and checks that the
second is the first with one repetition more. Linear in the actions of the small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from pipecompile.errors import ScheduleError
from pipecompile.ir import BACKWARDS, SHARDING, Action, Kind, Schedule
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.periodic import MOST_REPETITIONS, PeriodicSchedule, shifted
from pipecompile.ir.program_arrays import KINDS, action_columns
from pipecompile.ir.slices import check_whole
from pipecompile.schedules.catalogue import Builder, build_schedule
from pipecompile.text.input_checks import check_kind, whole
from pipecompile.verifiers import verify

__all__ = ["build_periodic", "find_period"]

Ints = NDArray[np.int64]

_LEAST = 3
"""Repetitions below which a pattern counts as chance."""


def find_period(schedule: Schedule) -> PeriodicSchedule | None:
    """Return the schedule as prologue, period and epilogue, with the shortest period; None if it has none of three repetitions.

    A period has step forwards and backwards of each stage. O(n s) for n actions and periods of s micro-batches, s at most twice the
    number of stages. Raise ScheduleError for a schedule of slices.
    """
    check_kind(schedule, Schedule, 'pc.build_schedule("1f1b", 4, 16)')
    check_whole(schedule, "periods are those of whole micro-batches")
    if schedule.overlaps or schedule.directions:
        return None
    columns = [action_columns(row) for row in schedule.rows]
    for step in range(1, min(2 * schedule.n_stages, schedule.n_microbatches // _LEAST) + 1):
        found = (_longest_run(row, step) for row in columns)
        runs = [run for run in takewhile(_is_repeated, found) if run is not None]
        if len(runs) < len(columns):
            continue
        later = _delays(
            schedule,
            [row[start : start + length] for row, (start, length, _) in zip(schedule.rows, runs, strict=True)],
            step,
        )
        count = min(count - more for (_, _, count), more in zip(runs, later, strict=True))
        if count < _LEAST:
            continue
        cuts = [(start + more * length, length) for (start, length, _), more in zip(runs, later, strict=True)]
        periodic = _cut(schedule, cuts, count, step)
        if _is_periodic(periodic, columns):
            return periodic
    return None


def _delays(schedule: Schedule, periods: Sequence[Sequence[Action]], step: int) -> list[int]:
    """Return how many periods of each device to leave to its prologue, so that no repetition needs a later one of another device.

    Longest paths: device b comes r later than device a if a needs, in its first period, what b computes in repetition r.
    """
    place = {
        (a.stage, _role(a)[1], a.microbatch % step): (d, a.microbatch)
        for d, row in enumerate(periods)
        for a in row
        if _computes(a)
    }
    edges = set[tuple[int, int, int]]()
    for device, row in enumerate(periods):
        for action in filter(_computes, row):
            is_forward = action.kind is Kind.FORWARD
            source = place.get((action.stage + (-1 if is_forward else 1), is_forward, action.microbatch % step))
            if source is not None and source[0] != device:
                edges.add((device, source[0], (action.microbatch - source[1]) // step))
    later = [0] * schedule.n_devices
    for _ in range(schedule.n_devices):
        for reader, writer, repetition in edges:
            later[writer] = max(later[writer], later[reader] + repetition)
    return later


def _computes(action: Action) -> bool:
    """Return whether the action gives others what they need: F, B and I."""
    return action.kind in (Kind.FORWARD, *BACKWARDS)


def _is_periodic(periodic: PeriodicSchedule, columns: Sequence[Ints]) -> bool:
    """Return whether a period has all that its device repeats: nothing in the epilogue is on a micro-batch of the repetitions."""
    rows = zip(columns, periodic.period, strict=True)
    is_after = all(a.microbatch >= 0 or a.kind in SHARDING for row in periodic.epilogue for a in row)
    return is_after and all(_is_whole(row, period, periodic.step) for row, period in rows)


def _is_whole(row: Ints, period: Sequence[Action], step: int) -> bool:
    """Return whether a period has `step` micro-batches of all that its device computes."""
    stages, kinds, _ = row
    roles = np.unique(2 * stages + (kinds == KINDS[Kind.FORWARD])).tolist()
    wanted = [(role // 2, bool(role % 2)) for role in roles]
    return Counter(_role(a) for a in period if _computes(a)) == dict.fromkeys(wanted, step)


def _role(action: Action) -> tuple[int, bool]:
    return action.stage, action.kind is Kind.FORWARD


def _cut(schedule: Schedule, runs: Sequence[tuple[int, int]], count: int, step: int) -> PeriodicSchedule:
    """Return the schedule cut at these starts of periods of these lengths."""
    cuts = list(zip(schedule.rows, runs, strict=True))
    prologue = tuple(row[:start] for row, (start, _) in cuts)
    period = tuple(row[start : start + length] for row, (start, length) in cuts)
    epilogue = tuple(shifted(row[start + length * count :], -step * count) for row, (start, length) in cuts)
    return PeriodicSchedule(
        schedule.n_stages, schedule.placement, prologue, period, epilogue, count, step, schedule.name
    )


def _is_repeated(run: tuple[int, int, int] | None) -> bool:
    return run is not None and run[2] >= _LEAST


def _longest_run(row: Ints, step: int) -> tuple[int, int, int] | None:
    """Return the start, the length of the period, and the repetitions of the longest periodic part of a row; None if it has none.

    `row` has (stage, kind, micro-batch) of each action, shape (3, actions). The length is the distance from the action in the middle
    of the row to the same one `step` micro-batches later.
    """
    middle, later = row.shape[1] // 2, np.array([[0], [0], [step]])
    same = np.flatnonzero((row[:, middle + 1 :] == row[:, middle : middle + 1] + later).all(axis=0))
    if not len(same):
        return None
    length = int(same[0]) + 1
    follows = (row[:, length:] == row[:, :-length] + later).all(axis=0)
    stops = np.append(np.flatnonzero(~follows), len(follows))
    starts = np.concatenate([[0], stops[:-1] + 1])
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), length, int(stops[longest] - starts[longest] + length) // length


@without_collection
def build_periodic(
    schedule: str | Builder, n_stages: int, n_microbatches: int, *, n_devices: int | None = None
) -> PeriodicSchedule:
    """Return a schedule of the catalogue, or of a function, in periodic form, without building all of its micro-batches.

    Raise ScheduleError if it has no period, or another one for more micro-batches.
    """
    n_stages, n_microbatches = (
        whole("n_stages", n_stages, 1),
        whole("n_microbatches", n_microbatches, 1, MOST_REPETITIONS),
    )
    why = ""
    for few in _sizes(n_stages, n_microbatches, n_stages if n_devices is None else n_devices):
        found = _grown(partial(build_schedule, schedule, n_stages, n_devices=n_devices), few, n_microbatches)
        if isinstance(found, PeriodicSchedule):
            verify(found)
            return found
        why = found
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "the schedule")
    raise ScheduleError(f"{name} has no period", why=why, hint="build_schedule, which has all micro-batches")


def _sizes(n_stages: int, n_microbatches: int, n_devices: int) -> Iterator[int]:
    """Yield numbers of micro-batches to look for a period in: the least, then about twice as many up to eight times.

    The latter leave the same rest as `n_microbatches` when they are divided by the devices: schedules of rounds of micro-batches have
    longer rounds for such a rest.
    """
    few = n_stages + 2 * _LEAST
    for times in (1, 2, 4, 8):
        size = few * times
        yield min(n_microbatches, size + (n_microbatches - size) % n_devices if times > 1 else size)
        if size >= n_microbatches:
            return


def _grown(build: Callable[[int], Schedule], few: int, n_microbatches: int) -> PeriodicSchedule | str:
    """Return the schedule of few micro-batches with as many repetitions as `n_microbatches` need, or why it has no period."""
    small = find_period(build(few))
    if small is not None and (rest := (n_microbatches - few) % small.step):
        few += rest
        small = find_period(build(few))
    if small is None:
        return f"no part of {few} micro-batches repeats {_LEAST} times"
    if few < n_microbatches:
        more = find_period(build(few + small.step))
        if (n_microbatches - few) % small.step or more != small.repeated(small.repetitions + 1):
            return f"{few} and {few + small.step} micro-batches repeat different parts"
    return small.repeated(small.repetitions + (n_microbatches - few) // small.step)
