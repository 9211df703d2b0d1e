"""Simulation of a task graph row by row, where every message has a link of its own two devices and no host launches.

    row 0   0F0 ──▶ 0F1 ──▶ ...       a row runs on until it needs a message that has not left,
    row 1           1F0 ?             and is resumed when this message leaves

A link has one sender, which sends in the order of its row. So no time depends on the order in which the rows are visited: no
queue of events is needed, as in `event_walk`. Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipecompile.simulation.task_graph import NEVER, NOTHING, TaskGraph, Times

__all__ = ["walk_rows"]


def walk_rows(tasks: TaskGraph, order_by_events: Callable[[], list[int]]) -> Times:
    """Return the earliest times of all tasks and messages, given the order of tasks in the rows.

    `order_by_events` finds the order of messages where some task takes no time: then several tasks end at one moment, and times
    alone do not tell their order.
    """
    walk = _RowWalk(tasks)
    for device, messages in enumerate(tasks.first_sends):
        walk.send(messages, 0.0, NOTHING)
        walk.ready.append(device)
    while walk.ready:
        walk.advance(walk.ready.pop())
    is_complete = all(task == row.stop for task, row in zip(walk.next, tasks.rows, strict=True))

    def order() -> list[int]:
        has_instants = any(
            end <= start and cause != NEVER for start, end, cause in zip(walk.start, walk.end, walk.cause, strict=True)
        )
        return order_by_events() if has_instants else _order_by_times(tasks, walk.end, walk.cause)

    return Times(walk.start, walk.end, walk.cause, walk.left, walk.arrival, walk.left_cause, order, is_complete)


class _RowWalk:
    """The times so far: `next` is the next task per device, `ready` the devices that may go on, `busy` the last message per link."""

    def __init__(self, tasks: TaskGraph) -> None:
        n, k = len(tasks.seconds), len(tasks.delays)
        self.tasks = tasks
        self.start, self.end, self.cause = [0.0] * n, [0.0] * n, [NEVER] * n
        self.left, self.arrival, self.left_cause = [0.0] * k, [-1.0] * k, [NOTHING] * k
        self.is_awaited = bytearray(k)
        self.next = [row.start for row in tasks.rows]
        self.ready: list[int] = []
        self.busy: dict[tuple[int, int], int] = {}

    def advance(self, device: int) -> None:
        """Run tasks of a device until one needs a message that has not left."""
        tasks, row, arrivals = self.tasks, self.tasks.rows[device], self.arrival
        needs, sends, seconds = tasks.needs, tasks.sends, tasks.seconds
        start, end, cause = self.start, self.end, self.cause
        first = self.next[device]
        now, last = (end[first - 1], first - 1) if first > row.start else (0.0, NOTHING)
        for task in range(first, row.stop):
            begin, why = now, last
            for message in needs[task]:
                arrival = arrivals[message]
                if arrival > begin:
                    begin, why = arrival, ~message
                elif arrival < 0:
                    self.is_awaited[message] = True
                    self.next[device] = task
                    return
            start[task], cause[task] = begin, why
            end[task] = now = begin + seconds[task]
            last = task
            if sends[task]:
                self.send(sends[task], now, task)
        self.next[device] = row.stop

    def send(self, messages: Sequence[int], now: float, task: int) -> None:
        """Send messages at `now` seconds, the end of `task`: each starts when its link is free."""
        delays, links, busy, arrivals = self.tasks.delays, self.tasks.links, self.busy, self.arrival
        for message in messages:
            seconds, begin, cause = delays[message], now, task
            if seconds:
                link = links[message]
                before = busy.get(link, -1)
                if before >= 0 and arrivals[before] > begin:
                    begin, cause = arrivals[before], ~before
                busy[link] = message
            self.left[message], arrivals[message], self.left_cause[message] = begin, begin + seconds, cause
            if self.is_awaited[message]:
                self.ready.append(links[message][1])


def _order_by_times(tasks: TaskGraph, ends: Sequence[float], causes: Sequence[int]) -> list[int]:
    """Return the messages in the order in which they are sent: by the end of the task, then by its number, which ascends by device."""
    order = [message for messages in tasks.first_sends for message in messages]
    senders = [task for task, messages in enumerate(tasks.sends) if messages and causes[task] != NEVER]
    for task in sorted(senders, key=ends.__getitem__):
        order += tasks.sends[task]
    return order
