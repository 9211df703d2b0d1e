"""The tasks of a schedule: one per action, and a message for every value and gradient that changes device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipecompile.ir import HOST, Kind, Route, Schedule, Value
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.task_graph import Anchor, Change, TaskGraph

__all__ = ["DeviceTransfer", "tasks_of_schedule", "device_transfers"]


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """A value (or with `consumer` a gradient) on its way from the stage that makes it to one other device, and the stages
    there that wait for it.
    """

    name: str
    consumer: int | None
    nbytes: float
    stage: int
    source: int
    target: int
    readers: tuple[int, ...]


def device_transfers(routes: Sequence[Route], placement: Sequence[int]) -> Iterator[DeviceTransfer]:
    """All crossings between devices; what comes from the host or goes there takes no time."""
    for route in routes:
        ends = [end for end in route.consumers if end != HOST]
        if route.source == HOST:
            continue
        source = placement[route.source]
        for target in dict.fromkeys(placement[end] for end in ends if placement[end] != source):
            readers = tuple(end for end in ends if placement[end] == target)
            yield DeviceTransfer(route.value, None, route.nbytes, route.source, source, target, readers)
        for end in ends if route.gradient else ():
            if placement[end] != source:
                yield DeviceTransfer(route.value, end, route.nbytes, end, placement[end], source, (route.source,))


def tasks_of_schedule(schedule: Schedule, routes: Sequence[Route], costs: Costs) -> TaskGraph:
    """For a legal schedule. What stages save counts as memory; the buffers of values do not. Linear."""
    lines, m = list(device_transfers(routes, schedule.placement)), schedule.n_microbatches
    ports = _ports(lines, schedule.n_stages, m)
    tasks = TaskGraph(changes=[[] for _ in schedule.rows])
    for row in schedule.rows:
        first = len(tasks.seconds)
        for action in row:
            needs, sends = ports[action.stage][action.kind]
            tasks.needs.append(needs[action.microbatch])
            tasks.sends.append(sends[action.microbatch])
            tasks.seconds.append(costs.seconds[action.kind][action.stage])
        tasks.actions += row
        tasks.rows.append(range(first, len(tasks.seconds)))
        tasks.first_sends.append(())
    for line in lines:
        tasks.links += [(line.source, line.target)] * m
        tasks.delays += [costs.message(line.name, line.nbytes, line.source, line.target)] * m
    names = [str(Value(line.name, 0, line.consumer))[:-1] for line in lines]
    tasks.label = lambda message: names[message // m] + str(message % m)
    if any(costs.saved) or any(costs.weight_saved) or any(costs.recipe):
        tasks.changes = _changes(schedule, costs)
    return tasks


Messages = list[tuple[int, ...]]
"""Per micro-batch, the numbers of messages."""


def _ports(lines: Sequence[DeviceTransfer], n_stages: int, m: int) -> list[dict[Kind, tuple[Messages, Messages]]]:
    """Per stage and kind, what an action needs and what it sends."""
    needs: list[dict[Kind, list[int]]] = [{kind: [] for kind in Kind} for _ in range(n_stages)]
    sends: list[dict[Kind, list[int]]] = [{kind: [] for kind in Kind} for _ in range(n_stages)]
    for index, line in enumerate(lines):
        for kind in (Kind.FORWARD,) if line.consumer is None else (Kind.BACKWARD, Kind.INPUT_GRAD):
            sends[line.stage][kind].append(index * m)
            for reader in line.readers:
                needs[reader][kind].append(index * m)
    return [
        {kind: (_numbered(needs[s][kind], m), _numbered(sends[s][kind], m)) for kind in Kind} for s in range(n_stages)
    ]


def _numbered(starts: list[int], m: int) -> Messages:
    return list(zip(*(range(start, start + m) for start in starts), strict=True)) if starts else [()] * m


def _changes(schedule: Schedule, costs: Costs) -> list[list[Change]]:
    """What stages save, from the start of the action that saves it to the end of the one that needs it last."""
    again = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
    trained = {a.stage for row in schedule.rows for a in row if a.kind is not Kind.FORWARD}
    task, found = 0, []
    for row in schedule.rows:
        changes: list[Change] = []
        for action in row:
            s, start, end = action.stage, ((Anchor.TASK_START, task),), ((Anchor.TASK_END, task),)
            task += 1
            match action.kind:
                case Kind.FORWARD if s in trained:
                    kept = costs.recipe if (s, action.microbatch) in again else costs.saved
                    changes.append((start, kept[s]))
                case Kind.RECOMPUTE:
                    changes += ((start, costs.saved[s]), (end, -costs.recipe[s]))
                case Kind.BACKWARD:
                    changes.append((end, -costs.saved[s]))
                case Kind.INPUT_GRAD:
                    changes.append((end, costs.weight_saved[s] - costs.saved[s]))
                case Kind.WEIGHT_GRAD:
                    changes.append((end, -costs.weight_saved[s]))
        found.append(changes)
    return found
