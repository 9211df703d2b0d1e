"""Periods of schedules: what a device repeats, with later micro-batches each time.

    1f1b, P = 3     F0 F1 │ F2 B0 │ F3 B1 │ F4 B2 │ ... │ B5 B6       device 0: the period is (F2 B0), one micro-batch later each time

A schedule of many micro-batches is one of few with more repetitions: `build_periodic` builds two small ones, and checks that the
second is the first with one repetition more. Linear in the actions of the small ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import BACKWARDS, SHARDING, Action, Kind, Schedule
from pipecompile.ir.input_checks import whole
from pipecompile.ir.periodic import MOST_REPETITIONS, PeriodicSchedule, shifted
from pipecompile.ir.slices import check_whole
from pipecompile.schedules.catalogue import Builder, build_schedule
from pipecompile.verifiers import verify

__all__ = ["build_periodic", "find_period"]

_LEAST = 3
"""Repetitions below which a pattern counts as chance."""


def find_period(schedule: Schedule) -> PeriodicSchedule | None:
    """Return the schedule as prologue, period and epilogue, with the shortest period; None if it has none of three repetitions.

    A period has step forwards and backwards of each stage. O(n s) for n actions and periods of s micro-batches, s at most twice the
    number of stages. Raise ScheduleError for a schedule of slices.
    """
    if not isinstance(schedule, Schedule):
        raise InputError(f"a {type(schedule).__name__} is no Schedule", hint='build_schedule("1f1b", 4, 16)')
    check_whole(schedule, "periods are those of whole micro-batches")
    if schedule.overlaps or schedule.directions:
        return None
    for step in range(1, min(2 * schedule.n_stages, schedule.n_microbatches // _LEAST) + 1):
        found = [_longest_run(row, step) for row in schedule.rows]
        runs = [run for run in found if run is not None]
        if len(runs) < len(found) or min(count for _, _, count in runs) < _LEAST:
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
        if _is_periodic(periodic, schedule):
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


def _is_periodic(periodic: PeriodicSchedule, schedule: Schedule) -> bool:
    """Return whether a period has all that its device repeats: nothing in the epilogue is on a micro-batch of the repetitions."""
    rows = zip(schedule.rows, periodic.period, strict=True)
    is_after = all(a.microbatch >= 0 or a.kind in SHARDING for row in periodic.epilogue for a in row)
    return is_after and all(_is_whole(row, period, periodic.step) for row, period in rows)


def _is_whole(row: Sequence[Action], period: Sequence[Action], step: int) -> bool:
    """Return whether a period has `step` micro-batches of all that its device computes."""
    wanted = {(stage, is_forward) for stage, is_forward in map(_role, row)}
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


def _longest_run(row: Sequence[Action], step: int) -> tuple[int, int, int] | None:
    """Return the start, the length of the period, and the repetitions of the longest periodic part of a row; None if it has none.

    The length is the distance from the action in the middle of the row to the same one `step` micro-batches later.
    """
    middle = len(row) // 2
    length = next((i for i in range(1, len(row) - middle) if _follows(row[middle], row[middle + i], step)), None)
    if length is None:
        return None
    best = start = 0
    found = None
    for index in range(len(row) - length + 1):
        if index + length == len(row) or not _follows(row[index], row[index + length], step):
            if index - start + length > best:
                best = index - start + length
                found = start, length, best // length
            start = index + 1
    return found


def _follows(action: Action, later: Action, step: int) -> bool:
    return (action.stage, action.kind, action.microbatch + step) == (later.stage, later.kind, later.microbatch)


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
    few = min(n_microbatches, n_stages + 2 * _LEAST)
    most = min(n_microbatches, 8 * few)
    while (small := find_period(build_schedule(schedule, n_stages, few, n_devices=n_devices))) is None:
        if few == most:
            raise _has_no_period(schedule, f"no part of {few} micro-batches repeats {_LEAST} times")
        few = min(2 * few, most)
    if rest := (n_microbatches - few) % small.step:
        few += rest
        small = _periodic(schedule, n_stages, few, n_devices)
    if few < n_microbatches:
        more = _periodic(schedule, n_stages, few + small.step, n_devices)
        if more != small.repeated(small.repetitions + 1):
            raise _has_no_period(schedule, f"{few} and {few + small.step} micro-batches repeat different parts")
    found = small.repeated(small.repetitions + (n_microbatches - few) // small.step)
    verify(found)
    return found


def _periodic(schedule: str | Builder, n_stages: int, n_microbatches: int, n_devices: int | None) -> PeriodicSchedule:
    found = find_period(build_schedule(schedule, n_stages, n_microbatches, n_devices=n_devices))
    if found is None:
        raise _has_no_period(schedule, f"no part of {n_microbatches} micro-batches repeats {_LEAST} times")
    return found


def _has_no_period(schedule: str | Builder, why: str) -> ScheduleError:
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "the schedule")
    return ScheduleError(f"{name} has no period", why=why, hint="build_schedule, which has all micro-batches")
