"""Critical path: the chain of tasks and messages, each of which waits for the one before, that is as long as the step.

    device 0   0F0 ──┐                    ┌──▶ 0B0
    link 0→1         └─▶ v0#0 ─┐    v0'1 ─┘
    device 1                   └─▶ 1F0 1B0          only shortening one of these can shorten the step

A task or message starts at the moment when the last task or message that it waits for ends, so the chain has no gaps. Linear.
"""

from __future__ import annotations

from pipecompile.simulation.event_walk import NOTHING, Times
from pipecompile.simulation.task_graph import TaskGraph

__all__ = ["critical_path"]


def critical_path(tasks: TaskGraph, times: Times) -> list[int]:
    """Return the path from first to last: t for task t, ~m for message m. Tasks and messages of 0 seconds are left out."""
    last_task = max(range(len(times.end)), key=times.end.__getitem__, default=NOTHING)
    last_message = max(range(len(times.message_end)), key=times.message_end.__getitem__, default=None)
    step = last_task
    if last_message is not None and (step == NOTHING or times.message_end[last_message] > times.end[step]):
        step = ~last_message
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
