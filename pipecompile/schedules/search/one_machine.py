"""The one-machine bound: actions with heads and tails on one device, which may interrupt an action for a more urgent one.

    head │ seconds ......... │ tail        always run the released action with the longest tail, and go on with others later

The makespan of this preemptive schedule is a lower bound on that of every schedule: Jackson, 1955; Carlier, "The One-Machine
Sequencing Problem", 1982. O(n log n).
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

__all__ = ["one_machine_bound"]

Job = tuple[float, float, float]
"""Head, duration and tail in seconds."""


def one_machine_bound(jobs: Iterable[Job]) -> float:
    """Return the makespan of the preemptive schedule in seconds."""
    ordered = sorted(jobs)
    released: list[list[float]] = []  # [minus the tail, seconds left]
    count, following = len(ordered), 0
    now = longest = 0.0
    while following < count or released:
        if not released:
            now = max(now, ordered[following][0])
        while following < count and ordered[following][0] <= now:
            _, seconds, tail = ordered[following]
            heappush(released, [-tail, seconds])
            following += 1
        until = ordered[following][0] if following < count else inf
        urgent = released[0]
        if now + urgent[1] <= until:
            heappop(released)
            now += urgent[1]
            longest = max(longest, now - urgent[0])
        else:
            urgent[1] -= until - now
            now = until
    return longest
