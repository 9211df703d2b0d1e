"""Launching by the host as a resource: the time at which the host launches each task of a device that works beside it.

    host       launch 0F0 │ launch 1F0 │ launch 0F1 │ ...          one thread for all devices, in the order in which it runs a program
    device 0              └─ 0F0 ─────┘             └─ 0F1 ──┘     a task starts when its launch begins, and ends after its launch does

The host waits for no device. So its times do not depend on the devices, and a sum over the launches gives them. Linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipecompile.ir import HOST, SHARDING, Action, Kind, Op, Program, Schedule
from pipecompile.ir.execution_order import merged
from pipecompile.simulation.costs import Costs, Hosts
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.task_graph import TaskGraph, Times

__all__ = ["input_posts", "issue_times", "launch_seconds", "stream_order", "walk_with_hosts"]

Issue = tuple[float, float]
"""Begin and end of a launch on the host, in seconds."""

_COPIES = frozenset((Kind.OFFLOAD, Kind.RELOAD, *SHARDING))
"""The kinds whose launch is one call, as that of a message: it takes the host no time here."""


def launch_seconds(action: Action | None, costs: Costs) -> float:
    """Return the seconds of the host for an action; B launches as much as I and W together, and copies launch no kernel."""
    if action is None or action.kind in _COPIES:
        return 0.0
    return costs.launch[action.stage] * (2 if action.kind is Kind.BACKWARD else 1)


def issue_times(subject: Schedule | Program, tasks: TaskGraph, costs: Costs) -> list[Issue]:
    """Return the begin and the end of each task's launch, per task; an empty list if launching takes no time."""
    if not any(costs.launch):
        return []
    if costs.hosts is Hosts.STEP:
        return [(0.0, max(costs.launch))] * len(tasks.actions)
    seconds = [launch_seconds(action, costs) for action in tasks.actions]
    if costs.hosts is Hosts.DEVICE:
        return [time for row in tasks.rows for time in _in_order(row, seconds).values()]
    order = _order_of_program(subject, tasks) if isinstance(subject, Program) else _order_of_starts(tasks, costs)
    times = _in_order(order, seconds)
    return [times[task] for task in range(len(seconds))]


def input_posts(subject: Schedule | Program, tasks: TaskGraph, costs: Costs) -> dict[int, float]:
    """Return the second at which the host launches the copy of each input, by its message; nothing if no copy or no launch takes time."""
    if not tasks.issued or not any(tasks.inputs):
        return {}
    if costs.hosts is Hosts.STEP:
        return {message: 0.0 for own in tasks.inputs for message in own}
    if isinstance(subject, Program):
        return _posts_of_program(subject, tasks, costs)
    first_reader: dict[int, int] = {}
    for row in tasks.rows:
        for task in row:
            for message in tasks.needs[task]:
                first_reader.setdefault(message, task)
    return {message: tasks.issued[first_reader[message]][0] for own in tasks.inputs for message in own}


def _posts_of_program(program: Program, tasks: TaskGraph, costs: Costs) -> dict[int, float]:
    inputs, now, posts = [iter(own) for own in tasks.inputs], dict[int, float](), dict[int, float]()
    for d, i in merged(program):
        instruction, thread = program.rows[d][i], d if costs.hosts is Hosts.DEVICE else 0
        now[thread] = now.get(thread, 0.0) + launch_seconds(instruction.action, costs)
        if instruction.op is Op.RECV and instruction.peer == HOST and (message := next(inputs[d], None)) is not None:
            posts[message] = now[thread]
    return posts


def stream_order(subject: Schedule | Program, tasks: TaskGraph, costs: Costs) -> list[int]:
    """Return, per task, the task of another device that one thread launches last before it on the same stream; -1 for none.

    Returns an empty list if no two devices share a stream.
    """
    if not costs.streams:
        return []
    order = _order_of_program(subject, tasks) if isinstance(subject, Program) else _order_of_starts(tasks, costs)
    device_of = {task: device for device, row in enumerate(tasks.rows) for task in row}
    after, latest = [-1] * len(tasks.seconds), dict[int, int]()
    for task in order:
        stream = costs.streams[device_of[task]]
        if (before := latest.get(stream, -1)) >= 0 and device_of[before] != device_of[task]:
            after[task] = before
        latest[stream] = task
    return after


def walk_with_hosts(subject: Schedule | Program, tasks: TaskGraph, costs: Costs) -> Times:
    """Return the times of tasks as `simulate` has them: with launches by the host, and devices that share a stream."""
    tasks.issued, tasks.after, tasks.posted = [], [], {}
    tasks.issued, tasks.after = issue_times(subject, tasks, costs), stream_order(subject, tasks, costs)
    tasks.posted = input_posts(subject, tasks, costs)
    return walk(tasks, costs.engines)


def _in_order(order: Iterable[int], seconds: Sequence[float]) -> dict[int, Issue]:
    """Return the times of a thread that launches tasks in this order."""
    times, now = {}, 0.0
    for task in order:
        times[task] = now, now + seconds[task]
        now += seconds[task]
    return times


def _order_of_program(program: Program, tasks: TaskGraph) -> list[int]:
    """Return the order in which one thread runs the program; a task that only waits is launched with the next one of its device."""
    following = [iter(row) for row in tasks.rows]
    order = []
    for d, i in merged(program):
        if program.rows[d][i].op is Op.COMPUTE:
            for task in following[d]:
                order.append(task)
                if tasks.actions[task] is not None:
                    break
    return [*order, *(task for row in following for task in row)]


def _order_of_starts(tasks: TaskGraph, costs: Costs) -> list[int]:
    """Return the tasks of a schedule by their start without a host. A task starts after all that it waits for."""
    starts = walk(tasks, costs.engines).start
    return sorted(range(len(starts)), key=starts.__getitem__)
