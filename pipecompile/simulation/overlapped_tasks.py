"""Actions that overlap in a task graph: two tasks of one row that begin together and end together.

    device      ... │ 0F2 │ 1B0 │ ...        what both need is there before the first, and both send after the second:
                      ╰─ pair ─╯             the two share the seconds of the pair in proportion to their own

So the memory of both is counted during the whole pair, and a device is busy for the seconds of the pair.
"""

from __future__ import annotations

from collections.abc import Collection

from pipecompile.ir.overlap import Pair
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.task_graph import TaskGraph

__all__ = ["overlap_tasks"]


def overlap_tasks(tasks: TaskGraph, overlaps: Collection[Pair], costs: Costs) -> None:
    """Join the tasks of each pair. The messages of the graph must be complete."""
    second_of = dict(overlaps)
    for first, action in enumerate(tasks.actions):
        second = None if action is None else second_of.get(action)
        if action is None or second is None:
            continue
        after = first + 1
        assert tasks.actions[after] == second, "the verifier lets only neighbours overlap"
        tasks.needs[first] += tuple(message for message in tasks.needs[after] if message not in tasks.needs[first])
        tasks.sends[after] = tasks.sends[first] + tasks.sends[after]
        tasks.needs[after] = tasks.sends[first] = ()
        own, both = tasks.seconds[first], tasks.seconds[first] + tasks.seconds[after]
        total = costs.overlap_seconds(action, second)
        tasks.seconds[first] = total * (own / both if both else 0.5)
        tasks.seconds[after] = total - tasks.seconds[first]
