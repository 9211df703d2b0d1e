"""The hint of an InfeasibleError: the least number of stages that would fit, under the same schedule."""

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
"""At most TRIES larger numbers of stages are tried, for SECONDS seconds each."""


def with_enough_stages(
    error: InfeasibleError, problem_of: Callable[[Options], Problem], options: Options
) -> InfeasibleError:
    """Return the error, with a number of stages that fits added to its hint if one is found.

    Every further stage gets a device of its own with the same memory limit.
    """
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
    """Return a `checkpoint` option that holds for any number of stages."""
    return options.checkpoint if isinstance(options.checkpoint, str) else "never"
