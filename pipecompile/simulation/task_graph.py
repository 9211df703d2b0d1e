"""Task graph: the input of a simulation. Tasks in rows, messages between them, and the memory that both add and free.

    row of device 0    task 0 ──▶ task 1 ──▶ task 2        a task starts when the one before it has ended
                         │ sends                  ▲ needs  and all messages that it needs have arrived
                      message 0 ──▶ ...       message 7    a message starts when the task that sends it has ended

Tasks are numbered row by row, so a row is a range. All data are numbers in lists: a walk over a million tasks allocates no
object per task.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum

from pipecompile.ir import Action

__all__ = ["NEVER", "NOTHING", "Anchor", "Change", "TaskGraph", "Times"]


class Anchor(IntEnum):
    """The event at which memory changes: the start or end of a task or of a message."""

    TASK_START = 0
    TASK_END = 1
    MESSAGE_START = 2
    MESSAGE_END = 3


Change = tuple[tuple[tuple[Anchor, int], ...], float]
"""((anchor, index of its task or message), ...), bytes: at the latest of these events a device holds these bytes more."""


@dataclass(slots=True)
class TaskGraph:
    """Tasks and messages of a run.

    Per device: `rows`, the range of its tasks, and `first_sends`, the messages that it sends before its first task. Per task:
    `actions` (None for a task that only waits), `seconds`, and the messages that it `needs` and `sends`. Per message: `links`,
    its (source, target) devices, and `delays`, its seconds.
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
    """Returns the name of message m."""
    changes: list[list[Change]] = field(default_factory=list)
    """Changes of memory per device, in the order of its row; empty lists if no value has a size."""
    issued: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of the launch of each task by the host, in seconds; an empty list if launching takes no time."""
    inputs: list[list[int]] = field(default_factory=list)
    """Per device, the messages that bring inputs from the host, in the order of its row; empty if they take no time."""
    posted: dict[int, float] = field(default_factory=dict)
    """The second at which the host launches the copy of an input, by its message; empty if launching takes no time."""
    after: list[int] = field(default_factory=list)
    """The task of another device before each task on a stream that both compute on, -1 for none; an empty list without such streams."""
    engines: dict[tuple[int, int], tuple[Hashable, ...]] = field(default_factory=dict)
    """Per link, what its messages occupy, one at a time, in the place of the link or of the copy engines; only links that share."""
    constant: tuple[float, ...] = ()
    """Bytes per device that it holds all the time; () for none."""

    @property
    def n_devices(self) -> int:
        return len(self.rows)


NOTHING = -(1 << 60)
"""Cause of a task or message that waited for no other."""

NEVER = NOTHING - 1
"""Cause of a task that has not started."""


@dataclass(frozen=True, slots=True)
class Times:
    """Start and end of tasks and messages in seconds. The cause is what each waited for last: t for task t, ~m for message m, and
    NOTHING for a launch by the host.

    `order` lists the messages in the order in which they were sent; it is found when it is read, from the tasks as they are then.
    `is_complete` is False if a row did not run to its end.
    """

    start: list[float]
    end: list[float]
    cause: list[int]
    message_start: list[float]
    message_end: list[float]
    message_cause: list[int]
    find_order: Callable[[], list[int]] = field(repr=False, compare=False)
    is_complete: bool

    @property
    def order(self) -> list[int]:
        """Return the messages in the order in which they were sent."""
        return self.find_order()

    @property
    def makespan(self) -> float:
        """Seconds from 0 to the last end of a task or message."""
        return max(max(self.end, default=0.0), max(self.message_end, default=0.0))
