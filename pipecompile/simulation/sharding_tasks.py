"""Sharded parameters in a task graph: UNSHARD and REDUCE_GRAD take no time on the device, their collectives do, one after the other.

    device        UNSHARD ── ... ── F ... RESHARD ... B ── REDUCE_GRAD       F waits for the gathered parameters
    collectives          ╰─ 0UNSHARD ─╯                        ╰─ 0REDUCE_GRAD ─╯      the step ends after the last of them

A collective is a message of a device to itself: with engines per pair of devices it has a resource of its own, the link to the other
copies, and with engines per device it shares the NIC of the device with messages to other stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipecompile.ir import Action, Kind
from pipecompile.simulation.sharding_costs import ShardingCosts
from pipecompile.simulation.task_graph import Anchor, TaskGraph

__all__ = ["add_sharding"]

Moment = tuple[Anchor, int]


def add_sharding(tasks: TaskGraph, costs: ShardingCosts) -> None:
    """Add the collectives of all rows, and the memory of gathered parameters and of gradients. The messages of the graph must be
    numbered.
    """
    first, label, names = len(tasks.links), tasks.label, list[str]()
    if not tasks.changes:
        tasks.changes = [[] for _ in tasks.rows]
    for device, row in enumerate(tasks.rows):
        state = _ShardedRow(tasks, costs, device, names)
        for task in row:
            action = tasks.actions[task]
            if action is not None:
                state.add(task, action)
    tasks.label = lambda message: label(message) if message < first else names[message - first]


@dataclass(slots=True)
class _ShardedRow:
    """The walk over a row: `gathering` has the collectives per stage that no action has waited for, `gathered` the last one of each
    stage, and `held` the stages whose gradients are in memory.
    """

    tasks: TaskGraph
    costs: ShardingCosts
    device: int
    names: list[str]
    gathering: dict[int, int] = field(default_factory=dict)
    gathered: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)

    def add(self, task: int, action: Action) -> None:
        """Add what an action sends, waits for, takes and frees."""
        stage, costs, end = action.stage, self.costs, (Anchor.TASK_END, task)
        match action.kind:
            case Kind.UNSHARD:
                self.change(costs.unsharded[stage], (Anchor.TASK_START, task))
                if (message := self.collective(task, action, costs.unshard[stage])) is not None:
                    self.gathering[stage] = self.gathered[stage] = message
            case Kind.RESHARD:
                self.gathering.pop(stage, None)
                self.change(-costs.unsharded[stage], end, *_ends(self.gathered.pop(stage, None)))
            case Kind.REDUCE_GRAD:
                message = self.collective(task, action, costs.reduce[stage])
                if stage in self.held:
                    self.change(-costs.gradients[stage], end, *_ends(message))
            case Kind.OFFLOAD | Kind.RELOAD:
                pass
            case _:
                self.compute(task, action)

    def compute(self, task: int, action: Action) -> None:
        if (message := self.gathering.pop(action.stage, None)) is not None:
            self.tasks.needs[task] += (message,)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD) and action.stage not in self.held:
            self.held.add(action.stage)
            self.change(self.costs.gradients[action.stage], (Anchor.TASK_START, task))

    def collective(self, task: int, action: Action, seconds: float) -> int | None:
        """Return the message of a collective that begins after a task; None if it takes no time."""
        if not seconds:
            return None
        message = len(self.tasks.links)
        self.tasks.links.append((self.device, self.device))
        self.tasks.delays.append(seconds)
        self.tasks.sends[task] += (message,)
        self.names.append(str(action))
        return message

    def change(self, size: float, *moments: Moment) -> None:
        if size:
            self.tasks.changes[self.device].append((moments, size))


def _ends(message: int | None) -> tuple[Moment, ...]:
    return () if message is None else ((Anchor.MESSAGE_END, message),)
