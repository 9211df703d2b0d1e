"""Walk a program under a cost model: a timeline, a memory curve per device, the critical path.

    device 0 │ 0F0  0F1            0B0        compute: in the order of the row, as soon as all reads are there
      to 1   │      v0#0 v0#1                 copies overlap compute, and queue for the engines that they occupy
    device 1 │           1F0  1B0
      to 0   │                     v0'1#0

A value written by a compute counts from its start on, a received copy on the receiver from the start of its transfer.
FREE takes it off at once, or when its last transfer ends. What I leaves for W is part of what was saved: it takes its
place. The host's transfers cost nothing.
"""

from __future__ import annotations

from typing import Unpack

from pipecompile.ir import Action, Program, Schedule, chain
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.in_flight import in_flight
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.simulation.costs import CostOptions, Costs, make_costs
from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.event_walk import Times, walk
from pipecompile.simulation.from_program import tasks_of_program
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.memory_curve import memory_curves
from pipecompile.simulation.task_graph import TaskGraph
from pipecompile.verifiers import verify

__all__ = ["prepare", "simulate"]


@without_collection
def simulate(subject: Schedule | Program, **costs: Unpack[CostOptions]) -> Timeline:
    """Predict a run. A schedule runs over a chain whose values have no size.

    Seconds, one number for all stages or one per stage: `forward`, `input_grad`, `weight_grad` (1 by default), `backward`
    (of one that is not divided; the last two together), `recompute` (as long as a forward). Seconds of a transfer between two devices:
    `transfer` (0; one number, or one per name of a route), plus `latency` (0), plus the value's bytes over `bandwidth`
    (infinite); the last two are one number, or one per (source, target) pair of devices. Copies queue for the way between
    their two devices, or with `engines="device"` for the one copy engine per direction that every device has.

    Bytes per stage, 0 by default: `saved_bytes` per micro-batch for the backward, `weight_saved_bytes` of that until W (all
    of it), `recipe_bytes` beside the inputs of a forward that is recomputed, `parameter_bytes` always. Other sizes are the
    routes'.

    A program is taken to be legal. O(n log P) for n instructions on P devices. Raises VerifyError when a schedule is not
    legal or a program does not run to its end, InputError when a cost is not a number per stage, route or pair.
    """
    tasks, checked = prepare(subject, **costs)
    return _timeline(subject, tasks, run_to_end(subject, tasks, checked))


def prepare(subject: Schedule | Program, **given: Unpack[CostOptions]) -> tuple[TaskGraph, Costs]:
    """What the walk needs. Raises VerifyError when a schedule is not legal, InputError."""
    match subject:
        case Schedule():
            verify(subject)
            routes = chain(subject.n_stages)
            costs = make_costs(subject.n_stages, subject.n_devices, routes, **given)
            tasks = tasks_of_schedule(subject, routes, costs)
        case Program():
            costs = make_costs(subject.n_stages, subject.n_devices, subject.routes, subject.ties, **given)
            tasks = tasks_of_program(subject, costs)
    if any(costs.parameters):
        homes = [[s for s, home in enumerate(subject.placement) if home == d] for d in range(subject.n_devices)]
        tasks.constant = tuple(sum(costs.parameters[s] for s in own) for own in homes)
    return tasks, costs


def run_to_end(subject: Schedule | Program, tasks: TaskGraph, costs: Costs) -> Times:
    """The times. Raises VerifyError with what is wrong when a program does not run to its end."""
    times = walk(tasks, costs.engines)
    if not times.is_complete:
        verify(subject)
        raise AssertionError("a legal program did not run to its end")
    return times


def _timeline(subject: Schedule | Program, tasks: TaskGraph, times: Times) -> Timeline:
    spans: dict[int, Span] = {}
    for device, row in enumerate(tasks.rows):
        for task in row:
            action = tasks.actions[task]
            if action is not None:
                spans[task] = Span(device, COMPUTE, str(action), times.start[task], times.end[task])
    for message in times.order:
        if tasks.delays[message]:
            source, target = tasks.links[message]
            start, end = times.message_start[message], times.message_end[message]
            spans[~message] = Span(source, f"to {target}", tasks.label(message), start, end)
    return Timeline(
        tasks.n_devices,
        tuple(spans.values()),
        memory_curves(tasks, times),
        in_flight(_actions(subject), subject.placement),
        tuple(spans[step] for step in critical_path(tasks, times)),
    )


def _actions(subject: Schedule | Program) -> list[list[Action]]:
    if isinstance(subject, Schedule):
        return [list(row) for row in subject.rows]
    return [[i.action for i in row if i.action is not None] for row in subject.rows]
