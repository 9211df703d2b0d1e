"""Messages between this rank and one other: threads send and receive them, in order, while the rank computes.

    rank 0   0F0  put v#0 ──► outbox ──────────► inbox ──► take v#0  1F0   rank 1
                  0F1                   c10d               1F1

A message waits in the inbox from when it comes until it is taken, as in the boxes of one process.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import Queue, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from pipecompile.distributed.parcels import HEADER, Parcel, end, is_end, room

__all__ = ["Inbox", "Outbox"]

_PATIENCE = timedelta(days=30)
"""A message of the end of a step is waited for from its beginning; who wants it now, looks at the clock."""

Sent = tuple[list[dist.Work], list[torch.Tensor]]
"""What is under way, and its bytes."""


class Outbox:
    """What this rank sends to `peer` of `group`. `error` is why it cannot any more."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self.group, self.peer, self.tag = group, peer, tag
        self.queue: Queue[Sent | None] = Queue()
        self.error: list[Exception] = []
        self.thread = _start(_hold_all, peer, self.queue, self.error)
        weakref.finalize(self, self.queue.put, None)

    def put(self, parcel: Parcel) -> None:
        """Begin to send; a thread holds the parcel until it is sent."""
        parts = [part for part in parcel if part is not None and not self.error]
        try:
            self.queue.put(([self.group.send([part], self.peer, self.tag) for part in parts], parts))
        except RuntimeError as caught:
            self.error.append(caught)

    def close(self) -> None:
        """Send nothing after what is there."""
        self.put(end())
        self.queue.put(None)

    def is_through(self, seconds: float) -> bool:
        """Has everything been sent? Waits so long for it."""
        with self.queue.all_tasks_done:
            if self.queue.unfinished_tasks:
                self.queue.all_tasks_done.wait(seconds)
            return not self.queue.unfinished_tasks


class Inbox:
    """What `peer` of `group` sends to this rank: (header, content), or the exception that ended it."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self.counts: SimpleQueue[int] = SimpleQueue()
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.thread = _start(_receive_all, peer, group, peer, tag, self.counts, self.queue)
        weakref.finalize(self, self.counts.put, 0)

    def expect(self, count: int) -> None:
        """So many more messages will come."""
        self.counts.put(count)

    def drain(self) -> None:
        """Take what comes, until the other closes."""
        self.counts.put(sys.maxsize)


def _start(job: Callable[..., None], peer: int, *rest: Any) -> Thread:
    thread = Thread(target=job, args=rest, name=f"pipecompile-{job.__name__}-{peer}", daemon=True)
    thread.start()
    return thread


def _hold_all(queue: Queue[Sent | None], error: list[Exception]) -> None:
    while (sent := queue.get()) is not None:
        try:
            _wait(sent[0])
        except Exception as caught:
            error.append(caught)
        sent = None
        queue.task_done()


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait(_PATIENCE)


def _receive_all(
    group: dist.ProcessGroup, peer: int, tag: int, counts: SimpleQueue[int], queue: SimpleQueue[Any]
) -> None:
    while count := counts.get():
        try:
            for _ in range(count):
                header = torch.empty(HEADER, dtype=torch.int64)
                group.recv([header], peer, tag).wait(_PATIENCE)
                if is_end(header):
                    raise ConnectionError("it has stopped")
                content, space = room(header)
                if space is not None:
                    group.recv([space], peer, tag).wait(_PATIENCE)
                queue.put((header, content))
                del content, space
        except Exception as caught:
            queue.put(caught)
            return
