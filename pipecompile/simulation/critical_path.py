"""The critical path: the chain of tasks and messages, each waiting for the one before, that is as long as the step.

    device 0   0F0 ──┐                    ┌──▶ 0B0
    link 0→1         └─▶ v0#0 ─┐    v0'1 ─┘
    device 1                   └─▶ 1F0 1B0          shorten one of these, and the step may get shorter; no other will do

A wait of a task or a message is always for one that ended at that very moment, so the chain has no holes.
"""

from __future__ import annotations

from pipecompile.simulation.event_walk import NOTHING, Times
from pipecompile.simulation.task_graph import TaskGraph

__all__ = ["critical_path"]


def critical_path(tasks: TaskGraph, times: Times) -> list[int]:
    """From first to last; task t is written t, message m is written ~m. What takes no time is left out."""
    last_task = max(range(len(times.end)), key=times.end.__getitem__, default=NOTHING)
    last_message = max(range(len(times.message_end)), key=times.message_end.__getitem__, default=None)
    step = last_task
    if last_message is not None and (step == NOTHING or times.message_end[last_message] > times.end[step]):
        step = ~last_message
    path = []
    while step != NOTHING:
        if step >= 0:
            takes, before = tasks.seconds[step], times.cause[step]
        else:
            takes, before = tasks.delays[~step], times.message_cause[~step]
        if takes:
            path.append(step)
        step = before
    return path[::-1]
