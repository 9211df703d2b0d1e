"""Schedules: in which order each device computes. One builder a file; `build_schedule` finds it by name.

A builder maps (n_stages, n_microbatches, n_devices), all checked, to a `Schedule`. It places stage s on device
`s mod n_devices` and knows nothing of communication: passes add that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.schedules.forward import build_forward
from pipecompile.schedules.gpipe import build_gpipe
from pipecompile.schedules.one_f_one_b import build_one_f_one_b

__all__ = ["BUILDERS", "Builder", "build_schedule"]

Builder = Callable[[int, int, int], Schedule]

BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {"gpipe": build_gpipe, "1f1b": build_one_f_one_b, "forward": build_forward}
)


def build_schedule(name: str, n_stages: int, n_microbatches: int, *, n_devices: int | None = None) -> Schedule:
    """The schedule `name` for these counts; one device per stage unless `n_devices` says fewer.

    Raises ScheduleError when the name is unknown or the schedule cannot be built for these counts.
    """
    builder = BUILDERS.get(name)
    if builder is None:
        raise ScheduleError(f"no schedule is called {name!r}", hint="one of " + ", ".join(map(repr, BUILDERS)))
    n_devices = n_stages if n_devices is None else n_devices
    _check_counts(n_stages=n_stages, n_microbatches=n_microbatches, n_devices=n_devices)
    if n_stages % n_devices:
        raise ScheduleError(
            f"{n_stages} stages cannot be dealt to {n_devices} devices",
            why="every device takes the same number of stages",
            hint=f"n_stages={_multiple_near(n_stages, n_devices)} or n_devices={n_stages}",
        )
    return builder(n_stages, n_microbatches, n_devices)


def _check_counts(**counts: object) -> None:
    given = ", ".join(f"{name}={count!r}" for name, count in counts.items())
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ScheduleError(f"{name} must be a whole number, at least 1", why=f"given: {given}")


def _multiple_near(count: int, factor: int) -> int:
    return max(1, round(count / factor)) * factor
