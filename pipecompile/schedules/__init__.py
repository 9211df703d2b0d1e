"""Schedules: in which order each device computes. One builder a file; `build_schedule` finds it by name.

    stages per device    1       1f1b, eager-1f1b, zb-h1, zb-h2
                         2       zbv, v-half, v-min, dualpipev: in a V
                         any     gpipe, interleaved, looped-bfs, interleaved-zb, forward: in a loop

`auto_schedule` searches for one under given costs. Builders know nothing of communication: passes add that.
"""

from __future__ import annotations

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.gc_pause import without_collection
from pipecompile.schedules.catalogue import CATALOGUE, Builder, Entry, register_schedule
from pipecompile.schedules.search.auto import auto_schedule

__all__ = ["CATALOGUE", "Builder", "Entry", "auto_schedule", "build_schedule", "register_schedule"]


@without_collection
def build_schedule(
    schedule: str | Builder, n_stages: int, n_microbatches: int, *, n_devices: int | None = None
) -> Schedule:
    """A schedule of the catalogue by its name, or what a function of (n_stages, n_microbatches, n_devices) builds.

    Several stages go on a device when `n_devices` is a fraction of `n_stages`; the result's `placement` says where they
    live. By default the schedules in a V take half as many devices as stages, all others one device per stage.
    Raises ScheduleError when the name is unknown or the schedule cannot be built for these counts.
    """
    entry = _entry(schedule)
    _check_counts(n_stages=n_stages, n_microbatches=n_microbatches)
    n_devices = entry.devices(n_stages) if n_devices is None else n_devices
    _check_counts(n_stages=n_stages, n_microbatches=n_microbatches, n_devices=n_devices)
    _check_dealing(schedule if isinstance(schedule, str) else "it", entry, n_stages, n_devices)
    return entry.build(n_stages, n_microbatches, n_devices)


def _entry(schedule: str | Builder) -> Entry:
    if callable(schedule):
        return Entry(schedule)
    if schedule not in CATALOGUE:
        raise ScheduleError(f"no schedule is called {schedule!r}", hint="one of " + ", ".join(map(repr, CATALOGUE)))
    return CATALOGUE[schedule]


def _check_counts(**counts: object) -> None:
    given = ", ".join(f"{name}={count!r}" for name, count in counts.items())
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} must be a whole number, at least 1", why=f"given: {given}")


def _check_dealing(name: str, entry: Entry, n_stages: int, n_devices: int) -> None:
    if n_stages % n_devices:
        raise ScheduleError(
            f"{n_stages} stages cannot be dealt to {n_devices} devices",
            why="every device takes the same number of stages",
            hint=f"n_stages={_multiple_near(n_stages, n_devices)} or n_devices={n_stages}",
        )
    if entry.chunks is not None and n_stages != entry.chunks * n_devices:
        per_device = "one stage" if entry.chunks == 1 else f"{entry.chunks} stages"
        others = [other for other, candidate in CATALOGUE.items() if candidate.chunks is None]
        hint = (
            f"n_stages={entry.chunks * n_devices}"
            if n_stages % entry.chunks
            else f"n_devices={n_stages // entry.chunks}"
        )
        raise ScheduleError(
            f"{name} runs {per_device} per device, not {n_stages} stages on {n_devices} devices",
            hint=f"{hint}, or one of {', '.join(map(repr, others))}",
        )


def _multiple_near(count: int, factor: int) -> int:
    return max(1, round(count / factor)) * factor
