"""Simulation in which a device computes more slowly while a copy to or from it is under way.

    link 0→1       │   ├── v0#0 ──────┤
    device 0       │F0 │F1════│F2═══..│          at 1 / (1 + contention) of its speed beside the copy, at full speed before and after

Copies keep their seconds. A running task has so much work left, and a speed since the last change of it; each change makes a new end of the
task and leaves the old one behind. O(n log n) for n tasks and messages.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush

from pipecompile.ir import HOST
from pipecompile.simulation.task_graph import NEVER, NOTHING, TaskGraph, Times

__all__ = ["walk_contended"]

_BEGIN, _ARRIVE, _END = range(3)
"""Kinds of events: a copy begins, it arrives, a task may end."""


def walk_contended(tasks: TaskGraph, contention: float) -> Times:
    """Return the times if compute takes 1 + `contention` times its seconds (a share) beside a copy. Links are those of `event_walk`."""
    return _ContendedWalk(tasks, contention).run()


class _ContendedWalk:
    """Per device: `copies` under way, the `running` task (-1 for none) with its `work` left in seconds since `since`, and the number of its
    `version`: an event of another version is out of date.
    """

    def __init__(self, tasks: TaskGraph, contention: float) -> None:
        n, k, d = len(tasks.seconds), len(tasks.delays), tasks.n_devices
        self.tasks, self.slowness = tasks, 1.0 + contention
        self.start, self.end, self.cause = [0.0] * n, [0.0] * n, [NEVER] * n
        self.left, self.arrival, self.left_cause = [0.0] * k, [-1.0] * k, [NOTHING] * k
        self.has_arrived, self.order = [False] * k, list[int]()
        self.next = [row.start for row in tasks.rows]
        self.copies, self.running, self.work, self.since, self.version = (
            [0] * d,
            [-1] * d,
            [0.0] * d,
            [0.0] * d,
            [0] * d,
        )
        self.busy: dict[Hashable, tuple[float, int]] = {}
        self.events: list[tuple[float, int, int, int]] = []

    def run(self) -> Times:
        for device, messages in enumerate(self.tasks.first_sends):
            self._send(messages, 0.0, NOTHING)
            self._start_next(device, 0.0)
        while self.events:
            now, kind, number, version = heappop(self.events)
            if kind == _END:
                if version == self.version[number]:
                    self._finish(number, now)
            else:
                self._change(number, now, 1 if kind == _BEGIN else -1)
        is_complete = all(task == row.stop for task, row in zip(self.next, self.tasks.rows, strict=True))
        return Times(
            self.start, self.end, self.cause, self.left, self.arrival, self.left_cause, lambda: self.order, is_complete
        )

    def _finish(self, device: int, now: float) -> None:
        task = self.running[device]
        self.running[device], self.end[task] = -1, now
        self.next[device] = task + 1
        self._send(self.tasks.sends[task], now, task)
        self._start_next(device, now)

    def _change(self, message: int, now: float, by: int) -> None:
        """Count a copy that begins or arrives at both of its ends, and start what waited for it."""
        source, target = self.tasks.links[message]
        for device in {source, target} - {HOST}:
            self._advance(device, now)
            self.copies[device] += by
            self._schedule_end(device)
        if by < 0:
            self._arrive(message, now)

    def _arrive(self, message: int, now: float) -> None:
        self.has_arrived[message] = True
        source, target = self.tasks.links[message]
        for device in dict.fromkeys((target, source)):
            if device != HOST and self.running[device] < 0:
                self._start_next(device, now)

    def _start_next(self, device: int, now: float) -> None:
        row, task = self.tasks.rows[device], self.next[device]
        if task == row.stop or not all(self.has_arrived[message] for message in self.tasks.needs[task]):
            return
        last = max(self.tasks.needs[task], key=self.arrival.__getitem__, default=-1)
        before = self.end[task - 1] if task > row.start else 0.0
        is_message = last >= 0 and self.arrival[last] > before
        self.cause[task] = ~last if is_message else task - 1 if task > row.start else NOTHING
        self.start[task], self.running[device] = now, task
        self.work[device], self.since[device] = self.tasks.seconds[task], now
        self._schedule_end(device)

    def _advance(self, device: int, now: float) -> None:
        """Take from the work left what was done since the last change of speed."""
        speed = 1 / self.slowness if self.copies[device] else 1.0
        self.work[device] = max(0.0, self.work[device] - (now - self.since[device]) * speed)
        self.since[device] = now

    def _schedule_end(self, device: int) -> None:
        self.version[device] += 1
        if self.running[device] >= 0:
            seconds = self.work[device] * (self.slowness if self.copies[device] else 1.0)
            heappush(self.events, (self.since[device] + seconds, _END, device, self.version[device]))

    def _send(self, messages: tuple[int, ...], now: float, task: int) -> None:
        for message in messages:
            seconds, begin, cause = self.tasks.delays[message], now, task
            link = self.tasks.links[message]
            if seconds:
                for engine in (occupied := self.tasks.engines.get(link) or (link,)):
                    free, last = self.busy.get(engine, (0.0, 0))
                    if free > begin:
                        begin, cause = free, ~last
                self.busy.update((engine, (begin + seconds, message)) for engine in occupied)
            self.left[message], self.arrival[message], self.left_cause[message] = begin, begin + seconds, cause
            self.order.append(message)
            if seconds:
                heappush(self.events, (begin, _BEGIN, message, 0))
                heappush(self.events, (begin + seconds, _ARRIVE, message, 0))
            else:
                self._arrive(message, now)
