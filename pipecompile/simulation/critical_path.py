"""Critical path: the chain of tasks and messages, each of which waits for the one before, that is as long as the step.

    device 0   0F0 ──┐                    ┌──▶ 0B0
    link 0→1         └─▶ v0#0 ─┐    v0'1 ─┘
    device 1                   └─▶ 1F0 1B0          only shortening one of these can shorten the step

A task or message starts at the moment when the last task or message that it waits for ends, so the chain has no gaps. Linear.
"""

from __future__ import annotations

from pipecompile.simulation.task_graph import NOTHING, TaskGraph, Times

__all__ = ["critical_path"]


def critical_path(tasks: TaskGraph, times: Times) -> list[int]:
    """Return the path from first to last: t for task t, ~m for message m. Tasks and messages of 0 seconds are left out."""
    step = times.end.index(max(times.end)) if times.end else NOTHING
    if times.message_end:
        last = max(times.message_end)
        step = ~times.message_end.index(last) if step == NOTHING or last > times.end[step] else step
    path = []
    while step != NOTHING:
        if step >= 0:
            seconds, previous = tasks.seconds[step], times.cause[step]
        else:
            seconds, previous = tasks.delays[~step], times.message_cause[~step]
        if seconds:
            path.append(step)
        step = previous
    return path[::-1]
