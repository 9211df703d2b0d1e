"""When nothing fits: the least number of stages that would, under the same schedule, added to the hint of the error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from pipecompile.errors import InfeasibleError, PartitionError, ScheduleError
from pipecompile.ir import Schedule
from pipecompile.options import Options
from pipecompile.partitioners import Problem, partition

__all__ = ["with_enough_stages"]

TRIES = 8
SECONDS = 1.0
"""So many more stages are tried at most, each for so long."""


def with_enough_stages(
    error: InfeasibleError, problem_of: Callable[[Options], Problem], options: Options
) -> InfeasibleError:
    """The error, with the number of stages that works if one is found: each on a device of its own, all with one limit."""
    alike = len(options.devices) == options.n_stages and not isinstance(options.memory_limit, tuple)
    forced = options.steering or options.speeds or isinstance(options.bandwidth, tuple)
    if not alike or forced or isinstance(options.schedule, Schedule) or "n_stages=" in error.hint:
        return error
    for count in range(options.n_stages + 1, options.n_stages + 1 + TRIES):
        with suppress(PartitionError, ScheduleError):
            more = replace(options, n_stages=count, devices=(*options.devices[:1] * count,), checkpoint=_mode(options))
            partition(problem_of(more), count, method="dp", time_limit=SECONDS)
            hint = f"{error.hint}, or n_stages={count}"
            return InfeasibleError(error.what, where=error.where, why=error.why, hint=hint)
    return error


def _mode(options: Options) -> str:
    """How stages recompute, however many there are."""
    return options.checkpoint if isinstance(options.checkpoint, str) else "never"
