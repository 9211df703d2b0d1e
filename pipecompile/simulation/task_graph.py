"""What a walk sees of a program: tasks in rows, messages between them, and what both do to the memory of a device.

    row of device 0    task 0 ──▶ task 1 ──▶ task 2        a task starts when the one before it has ended
                         │ sends                  ▲ needs  and all messages that it needs are there
                      message 0 ──▶ ...       message 7    a message starts when the task that sends it has ended

TaskGraph are numbered row by row, so a row is a range. Everything is a number in a list: a walk over a million tasks makes no
object per task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from pipecompile.ir import Action

__all__ = ["Anchor", "Change", "TaskGraph"]


class Anchor(IntEnum):
    """The moment of a change: when a task, or a message, starts or ends."""

    TASK_START = 0
    TASK_END = 1
    MESSAGE_START = 2
    MESSAGE_END = 3


Change = tuple[tuple[tuple[Anchor, int], ...], float]
"""At the latest of these moments a device holds so many bytes more, or less."""


@dataclass(slots=True)
class TaskGraph:
    """`rows[d]` is the range of tasks of device d; a task without an action only waits. `first_sends[d]` are the messages
    that a device sends before its first task.
    """

    rows: list[range] = field(default_factory=list)
    actions: list[Action | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)
    sends: list[tuple[int, ...]] = field(default_factory=list)
    first_sends: list[tuple[int, ...]] = field(default_factory=list)
    links: list[tuple[int, int]] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    label: Callable[[int], str] = str
    """The name of a message."""
    changes: list[list[Change]] = field(default_factory=list)
    """Per device, in the order of its row; none when nothing has a size."""
    constant: tuple[float, ...] = ()
    """Bytes that a device holds all the time."""

    @property
    def n_devices(self) -> int:
        return len(self.rows)
