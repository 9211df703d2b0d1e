"""`simulate`: a schedule or program under a cost model gives a timeline with memory curves and the critical path.

    device 0 │ 0F0  0F1            0B0        compute: in the order of the row, as soon as all values it reads have arrived
      to 1   │      v0#0 v0#1                 copies overlap compute, and queue for the engines that they occupy
    device 1 │           1F0  1B0
      to 0   │                     v0'1#0

Memory: a value counts from the start of the compute that writes it, and on a receiver from the start of the transfer, until FREE
or the end of its last transfer. What I leaves for W replaces what F saved. Outputs take no time on their way to the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import HOST, Program, Route, Schedule, place
from pipecompile.ir.directions import copies_placed, stages_on
from pipecompile.ir.gc_pause import without_collection
from pipecompile.ir.in_flight import action_rows, in_flight
from pipecompile.ir.timeline import COMPUTE, Span, Timeline
from pipecompile.simulation.costs import CostOptions, Costs, cost_fingerprint, make_costs
from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_program import tasks_of_program
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.host_launches import input_posts, issue_times, stream_order
from pipecompile.simulation.memory_curve import memory_curves
from pipecompile.simulation.task_graph import TaskGraph, Times
from pipecompile.verifiers import verify
from pipecompile.verifiers.routes import checked_routes, route_sequence

__all__ = ["build_tasks", "make_timeline", "run_to_end", "simulate"]

COLLECTIVES = "collectives"
"""Track of what copies of the pipeline do together."""


@without_collection
def simulate(
    subject: Schedule | Program, *, routes: Sequence[Route] | None = None, **costs: Unpack[CostOptions]
) -> Timeline:
    """Return the predicted timeline of a run. A schedule runs over `routes`, by default a chain of values of 0 bytes; a program has
    its own.

    Seconds per stage, one number for all stages or a list: `forward`, `input_grad`, `weight_grad` (default 1), `backward` of a
    backward that is not split (default: the sum of `input_grad` and `weight_grad`), `recompute` (default: as `forward`).
    Seconds of a transfer between two devices: `transfer` (default 0; one number, or a dict by route name), plus `latency`
    (default 0), plus the bytes of the value divided by `bandwidth` in bytes/s (default infinite); `latency` and `bandwidth` are one
    number, or a dict by (source, target) devices. Copies queue for the link between their two devices, or with
    `engines="device"` for one copy engine per device and direction.

    Copies of inputs from the host, whose routes have the source HOST: `host_latency` in seconds (default 0), plus their bytes divided by
    `host_bandwidth` in bytes/s (default infinite). They run beside the device, one at a time, up to three inputs ahead of it.

    Seconds of the host per stage: `launch`, to launch an F, R, I or W on a device that works beside the host (default 0; a B takes
    twice as long). One thread launches for all devices, or with `hosts="device"` one per device; with `hosts="step"` one launch, as
    long as the longest of an F, starts the whole step, as `cuda_graphs="step"` does. `streams`: per device the number of its
    stream. Devices on one stream compute one after another, as one thread launches them (default: a stream per device).

    Seconds per stage of a copy of what its forward saved to the host by OFFLOAD, or back by RELOAD: `offload` (default 0). It runs
    beside the device, one copy in each direction at a time.

    Seconds per stage of gathering sharded parameters by UNSHARD, and of summing gradients over copies by REDUCE_GRAD: `unshard`,
    `reduce_grad` (default 0), plus `unsharded_bytes` and `gradient_bytes` divided by `shard_bandwidth` in bytes/s (default infinite).
    They run beside the device, one at a time, on the link to the other copies, or with `engines="device"` on the device's own.

    Seconds per stage that are communication within a stage, such as the all-to-all of experts, and part of F (`forward_communication`,
    default 0) or of B and I (`backward_communication`): F and B that overlap take the seconds of the busier of compute and communication,
    and no less than either. Or `overlap`: the seconds of a pair, one number or a dict by (stage of F, stage of B).

    Bytes per stage, default 0: `saved_bytes` per micro-batch until the backward, `weight_saved_bytes` of these until W (default:
    all), `recipe_bytes` that a recomputed forward keeps beside its inputs, `parameter_bytes` all the time, `unsharded_bytes` of
    gathered parameters from UNSHARD to RESHARD, `gradient_bytes` from the first B or W to the end of REDUCE_GRAD. The bytes of
    values are those of the routes.

    Of a schedule or program of slices the costs, and the bytes of routes, are those of whole micro-batches. `slice_seconds` has per
    slice its share in the seconds of F, R, B, I and W, and `slice_bytes` its share in all bytes, in `transfer` and in `offload`.
    Shares sum to 1, and are equal by default. Each message of a slice has the whole `latency`, and each action the whole `launch`.
    `peak_in_flight` counts slices. What a slice saves, and what a recomputed one keeps, includes its keys and values.

    The timeline of a schedule of `auto_schedule` under the same costs has the `bound` and the `gap` that the search proved.

    A program has to be legal. O(n log P) for n instructions on P devices. Raises VerifyError if a schedule is not legal or a
    program sends a value twice or does not run to its end, and InputError if a cost is not a number per stage, route or pair of devices.
    """
    tasks, checked = build_tasks(subject, routes, **costs)
    timeline = make_timeline(subject, tasks, run_to_end(subject, tasks, checked))
    if isinstance(subject, Schedule) and subject.certificate is not None:
        fingerprint = cost_fingerprint(checked, checked_routes(routes, subject.n_stages))
        return (
            replace(timeline, bound=subject.certificate.bound) if fingerprint == subject.certificate.costs else timeline
        )
    return timeline


def build_tasks(
    subject: Schedule | Program,
    routes: Sequence[Route] | None = None,
    *,
    rendezvous: bool = False,
    **options: Unpack[CostOptions],
) -> tuple[TaskGraph, Costs]:
    """Return the task graph and the checked costs. With `rendezvous`, sends and receives of a program wait for each other. Raises
    VerifyError if a schedule is not legal, and InputError.
    """
    match subject:
        case Schedule():
            verify(subject, routes=routes)
            routes = route_sequence(routes, subject.n_stages)
            costs = make_costs(subject.n_stages, subject.n_devices, routes, (), subject.n_slices, **options)
            tasks = tasks_of_schedule(subject, routes, costs)
        case Program():
            if routes is not None:
                raise InputError("routes are given together with a program, which has its own", hint="no routes")
            if len(subject.placement) != subject.n_stages or subject.n_slices < 1:
                verify(subject)
            moved = subject.routes, subject.ties, subject.n_slices
            costs = make_costs(subject.n_stages, subject.n_devices, *moved, **options)
            tasks = _tasks_of_program(subject, costs, rendezvous=rendezvous)
        case _:
            raise InputError(
                f"{type(subject).__name__} is neither a Schedule nor a Program",
                hint='pc.build_schedule("1f1b", 4, 8), or the program of a pipeline: pipe.program',
            )
    if any(costs.parameters):
        stages_of = stages_on(subject, subject.n_devices)
        tasks.constant = tuple(sum(costs.parameters[s] for s in own) for own in stages_of)
    tasks.issued, tasks.after = issue_times(subject, tasks, costs), stream_order(subject, tasks, costs)
    tasks.posted = input_posts(subject, tasks, costs)
    return tasks, costs


def _tasks_of_program(program: Program, costs: Costs, *, rendezvous: bool) -> TaskGraph:
    """Return the tasks of a program. Raise VerifyError with the faults of a program that names what it does not have, or sends a
    value twice.
    """
    try:
        tasks = tasks_of_program(program, costs, rendezvous=rendezvous)
    except (LookupError, StopIteration):
        verify(program)
        raise
    if sum(map(len, (*tasks.sends, *tasks.first_sends))) > len(tasks.delays):
        verify(program)  # what is sent again after it was read would be a cause of itself
    return tasks


def run_to_end(subject: Schedule | Program, tasks: TaskGraph, costs: Costs) -> Times:
    """Return the simulated times. Raises VerifyError with the faults of a program that does not run to its end."""
    times = walk(tasks, costs.engines)
    if not times.is_complete:
        verify(subject)
        raise AssertionError("a legal program did not run to its end")
    return times


def make_timeline(subject: Schedule | Program, tasks: TaskGraph, times: Times) -> Timeline:
    """Return spans, memory curves, peaks and critical path of simulated times."""
    tracks = _tracks(tasks)
    return Timeline(
        tasks.n_devices,
        (*_task_spans(tasks, times), *_message_spans(tasks, times, tracks)),
        memory_curves(tasks, times),
        in_flight(action_rows(subject), copies_placed(subject)),
        tuple(_span(step, tasks, times, tracks) for step in critical_path(tasks, times)),
    )


def _tracks(tasks: TaskGraph) -> dict[tuple[int, int], tuple[int, str]]:
    """Return, per (source, target) of a message, the device and the track of its span."""
    names = {
        (source, target): (target, "from host") if source == HOST else (source, f"to {place(target)}")
        for source, target in set(tasks.links)
    }
    return names | {(source, target): (source, COLLECTIVES) for source, target in names if source == target}


def _task_spans(tasks: TaskGraph, times: Times) -> Iterator[Span]:
    for device, row in enumerate(tasks.rows):
        part = slice(row.start, row.stop)
        for action, start, end in zip(tasks.actions[part], times.start[part], times.end[part], strict=True):
            if action is not None:
                yield Span(device, COMPUTE, str(action), start, end)


def _message_spans(tasks: TaskGraph, times: Times, tracks: Mapping[tuple[int, int], tuple[int, str]]) -> Iterator[Span]:
    """Yield the spans of the messages that take time, in the order in which they are sent."""
    if any(tasks.delays):
        for message in times.order:
            if tasks.delays[message]:
                yield _span(~message, tasks, times, tracks)


def _span(step: int, tasks: TaskGraph, times: Times, tracks: Mapping[tuple[int, int], tuple[int, str]]) -> Span:
    """Return the span of task t, or of message m from ~m."""
    if step >= 0:
        device = next(device for device, row in enumerate(tasks.rows) if step in row)
        return Span(device, COMPUTE, str(tasks.actions[step]), times.start[step], times.end[step])
    device, track = tracks[tasks.links[~step]]
    return Span(device, track, tasks.label(~step), times.message_start[~step], times.message_end[~step])
