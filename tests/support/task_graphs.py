"""Task graphs written by hand."""

from __future__ import annotations

from pipecompile.simulation.task_graph import TaskGraph


def graph(rows: list[list[float]], messages: list[tuple[int, int, float]], devices: list[tuple[int, int]]) -> TaskGraph:
    """Return a graph of rows of seconds; a message is (sending task, needing task, seconds) between its devices."""
    tasks = TaskGraph(links=devices)
    for row in rows:
        first = len(tasks.seconds)
        tasks.seconds += row
        tasks.rows.append(range(first, len(tasks.seconds)))
        tasks.first_sends.append(())
    tasks.needs, tasks.sends = [() for _ in tasks.seconds], [() for _ in tasks.seconds]
    for message, (sender, receiver, seconds) in enumerate(messages):
        tasks.sends[sender] += (message,)
        tasks.needs[receiver] += (message,)
        tasks.delays.append(seconds)
    return tasks
