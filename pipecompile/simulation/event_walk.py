"""Discrete-event simulation of a task graph.

    events   (end of a task, device)        at the next event the messages of the task leave, and its device starts its next task;
                                            a task whose needed messages have not all left suspends its device

Copies occupy their engines first come, first served. O(n log P) for n tasks and messages on P devices.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipecompile.ir import HOST
from pipecompile.simulation.costs import Engines
from pipecompile.simulation.row_walk import walk_rows
from pipecompile.simulation.task_graph import NEVER, NOTHING, TaskGraph, Times

__all__ = ["walk", "walk_events"]


def walk(tasks: TaskGraph, engines: Engines = Engines.PAIR) -> Times:
    """Return the earliest times of all tasks and messages, given the order of tasks in the rows."""
    if engines is Engines.DEVICE or tasks.issued or tasks.after or tasks.engines:
        return walk_events(tasks, engines)
    return walk_rows(tasks, lambda: walk_events(tasks).order)


def walk_events(tasks: TaskGraph, engines: Engines = Engines.PAIR) -> Times:
    """Return the times as `walk` does, by events for any resources."""
    return _EventWalk(tasks, engines).run()


class _EventWalk:
    """The state of a simulation: `next` is the next task per device, `busy` the end and last message per engine.

    `waiting` maps a task that has not started to the device whose next task comes after it on a stream of both.
    """

    def __init__(self, tasks: TaskGraph, engines: Engines) -> None:
        n, k = len(tasks.seconds), len(tasks.delays)
        self.tasks = tasks
        self.start, self.end, self.cause = [0.0] * n, [0.0] * n, [NEVER] * n
        self.left, self.arrival, self.left_cause = [0.0] * k, [-1.0] * k, [NOTHING] * k
        self.is_awaited = [False] * k
        self.order: list[int] = []
        self.is_held_up = bool(tasks.issued or tasks.after)
        self.launched = [end for _, end in tasks.issued]
        self.waiting: dict[int, int] = {}
        self.next = [row.start for row in tasks.rows]
        self.events: list[tuple[float, int, int]] = []
        self.by_device = engines is Engines.DEVICE
        self.busy: dict[object, tuple[float, int]] = {}

    def run(self) -> Times:
        for device, messages in enumerate(self.tasks.first_sends):
            self._send(messages, 0.0, NOTHING)
            self._start_next(device)
        sends, events = self.tasks.sends, self.events
        while events:
            now, device, task = heappop(events)
            if messages := sends[task]:
                self._send(messages, now, task)
            self._start_next(device)
        is_complete = all(task == row.stop for task, row in zip(self.next, self.tasks.rows, strict=True))
        return Times(
            self.start, self.end, self.cause, self.left, self.arrival, self.left_cause, lambda: self.order, is_complete
        )

    def _start_next(self, device: int) -> None:
        """Start the next task of a device at the time when its needs have arrived; do nothing while some have not left."""
        row, task, arrivals = self.tasks.rows[device], self.next[device], self.arrival
        if task == row.stop:
            return
        ready, cause = (self.end[task - 1], task - 1) if task > row.start else (0.0, NOTHING)
        for message in self.tasks.needs[task]:
            arrival = arrivals[message]
            if arrival < 0:
                self.is_awaited[message] = True
                return
            if arrival > ready:
                ready, cause = arrival, ~message
        if self.is_held_up and not self._may_start(device, task):
            return
        self.next[device] = task + 1
        if self.is_held_up:
            ready, cause = self._held_up(task, ready, cause)
        self.start[task], self.cause[task] = ready, cause
        self.end[task] = end = max(ready + self.tasks.seconds[task], self.launched[task] if self.launched else 0.0)
        heappush(self.events, (end, device, task))
        if self.waiting:
            self._resume(task)

    def _may_start(self, device: int, task: int) -> bool:
        """Return False, and note the device, if the task before this one on its stream has not started."""
        before = self.tasks.after[task] if self.tasks.after else -1
        if before >= 0 and self.cause[before] == NEVER:
            self.waiting[before] = device
            return False
        return True

    def _held_up(self, task: int, ready: float, cause: int) -> tuple[float, int]:
        """Return the start of a task and its cause, with the launch by the host and the task before it on its stream."""
        before = self.tasks.after[task] if self.tasks.after else -1
        if before >= 0 and self.end[before] > ready:
            ready, cause = self.end[before], before
        begin = self.tasks.issued[task][0] if self.tasks.issued else 0.0
        return (begin, NOTHING) if begin > ready else (ready, cause)

    def _resume(self, task: int) -> None:
        """Start the task that waited for this one to start."""
        if (device := self.waiting.pop(task, None)) is not None:
            self._start_next(device)

    def _send(self, messages: tuple[int, ...], now: float, task: int) -> None:
        """Send messages at `now`, the end of `task`: each starts when its engines are free."""
        shared, posted = self.tasks.engines, self.tasks.posted
        for message in messages:
            seconds, begin, cause = self.tasks.delays[message], now, task
            if posted and posted.get(message, 0.0) > begin:
                begin, cause = posted[message], NOTHING
            source, target = link = self.tasks.links[message]
            if seconds:
                occupied = shared.get(link) or (_engines(source, target) if self.by_device else (link,))
                for engine in occupied:
                    free, last = self.busy.get(engine, (0.0, 0))
                    if free > begin:
                        begin, cause = free, ~last
                self.busy.update((engine, (begin + seconds, message)) for engine in occupied)
            self.left[message], self.arrival[message], self.left_cause[message] = begin, begin + seconds, cause
            self.order.append(message)
            if self.is_awaited[message]:
                self._start_next(target)


def _engines(source: int, target: int) -> tuple[int, ...]:
    """Return the sending engine of the source and the receiving engine of the target; the host has none."""
    return (~target,) if source == HOST else (source,) if target == HOST else (source, ~target)
