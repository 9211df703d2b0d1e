"""Walk tasks and messages in the order of time.

    events   (end of a task, device)        the next event: its messages leave, the device goes on to its next task
                                            a task whose messages have not all left parks its device

A message takes the engines that it occupies first come, first served. O(n log P) for n tasks and messages on P devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from pipecompile.simulation.costs import Engines
from pipecompile.simulation.task_graph import TaskGraph

__all__ = ["NOTHING", "Times", "walk"]

NOTHING = -(1 << 60)
"""The cause of what waited for nothing."""


@dataclass(frozen=True, slots=True)
class Times:
    """When tasks and messages start and end, and what each waited for last: task t is written t, message m is written ~m.

    `order` are the messages as they started. `is_complete`: every row came to its end.
    """

    start: list[float]
    end: list[float]
    cause: list[int]
    message_start: list[float]
    message_end: list[float]
    message_cause: list[int]
    order: list[int]
    is_complete: bool

    @property
    def makespan(self) -> float:
        return max(max(self.end, default=0.0), max(self.message_end, default=0.0))


def walk(tasks: TaskGraph, engines: Engines = Engines.PAIR) -> Times:
    """The earliest times at which everything can happen in this order."""
    state = _State(tasks, engines)
    return state.run()


class _State:
    def __init__(self, tasks: TaskGraph, engines: Engines) -> None:
        n, k = len(tasks.seconds), len(tasks.delays)
        self.tasks = tasks
        self.start, self.end, self.cause = [0.0] * n, [0.0] * n, [NOTHING] * n
        self.left, self.there, self.why = [0.0] * k, [-1.0] * k, [NOTHING] * k
        self.is_awaited = [False] * k
        self.order: list[int] = []
        self.next = [row.start for row in tasks.rows]
        self.events: list[tuple[float, int, int]] = []
        self.by_device = engines is Engines.DEVICE
        self.busy: dict[object, tuple[float, int]] = {}

    def run(self) -> Times:
        for device, messages in enumerate(self.tasks.first_sends):
            self._leave(messages, 0.0, NOTHING)
            self._go_on(device)
        sends, events = self.tasks.sends, self.events
        while events:
            now, device, task = heappop(events)
            if messages := sends[task]:
                self._leave(messages, now, task)
            self._go_on(device)
        done = all(at == row.stop for at, row in zip(self.next, self.tasks.rows, strict=True))
        return Times(self.start, self.end, self.cause, self.left, self.there, self.why, self.order, done)

    def _go_on(self, device: int) -> None:
        """Start the next task of a device, or park it."""
        row, task, there = self.tasks.rows[device], self.next[device], self.there
        if task == row.stop:
            return
        ready, cause = (self.end[task - 1], task - 1) if task > row.start else (0.0, NOTHING)
        for message in self.tasks.needs[task]:
            arrival = there[message]
            if arrival < 0:
                self.is_awaited[message] = True
                return
            if arrival > ready:
                ready, cause = arrival, ~message
        self.next[device] = task + 1
        self.start[task], self.cause[task] = ready, cause
        self.end[task] = end = ready + self.tasks.seconds[task]
        heappush(self.events, (end, device, task))

    def _leave(self, messages: tuple[int, ...], now: float, task: int) -> None:
        for message in messages:
            seconds, begin, cause = self.tasks.delays[message], now, task
            source, target = way = self.tasks.links[message]
            if seconds:
                occupied = (source, ~target) if self.by_device else (way,)
                for engine in occupied:
                    free, last = self.busy.get(engine, (0.0, 0))
                    if free > begin:
                        begin, cause = free, ~last
                self.busy.update((engine, (begin + seconds, message)) for engine in occupied)
            self.left[message], self.there[message], self.why[message] = begin, begin + seconds, cause
            self.order.append(message)
            if self.is_awaited[message]:
                self._go_on(target)
