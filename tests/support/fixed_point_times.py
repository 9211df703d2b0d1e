"""An independent slow simulation: times grow until they satisfy all waits. For links between pairs of devices."""

from __future__ import annotations

from pipecompile.simulation.task_graph import TaskGraph


def fixed_point_times(tasks: TaskGraph) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return start and end of tasks, and start and end of messages: the least times that satisfy every wait.

    A task waits for the task before it in its row and for its messages, a message for its task and for the message with a duration
    before it on its link. The graph must be free of deadlocks. Cubic.
    """
    waits = _waits_of_messages(tasks)
    starts, left = [0.0] * len(tasks.seconds), [0.0] * len(tasks.delays)
    is_settled = False
    while not is_settled:
        is_settled = True
        ends = [start + seconds for start, seconds in zip(starts, tasks.seconds, strict=True)]
        arrivals = [start + seconds for start, seconds in zip(left, tasks.delays, strict=True)]
        for row in tasks.rows:
            for task in row:
                earliest = max([ends[task - 1] if task > row.start else 0.0, *(arrivals[m] for m in tasks.needs[task])])
                if earliest > starts[task]:
                    starts[task], is_settled = earliest, False
        for message, (sender, before) in enumerate(waits):
            earliest = max(0.0 if sender is None else ends[sender], 0.0 if before is None else arrivals[before])
            if earliest > left[message]:
                left[message], is_settled = earliest, False
    return starts, ends, left, arrivals


def _waits_of_messages(tasks: TaskGraph) -> list[tuple[int | None, int | None]]:
    """Return, per message, its task and the message before it on its link; None for none."""
    waits: list[tuple[int | None, int | None]] = [(None, None)] * len(tasks.delays)
    last: dict[tuple[int, int], int] = {}
    for device, row in enumerate(tasks.rows):
        steps = [(None, tasks.first_sends[device]), *((task, tasks.sends[task]) for task in row)]
        for task, messages in steps:
            for message in messages:
                link = tasks.links[message]
                waits[message] = task, last.get(link) if tasks.delays[message] else None
                if tasks.delays[message]:
                    last[link] = message
    return waits
