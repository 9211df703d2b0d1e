"""Task graph of a schedule: a task per action, and a message per value or gradient that moves to another device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipecompile.ir import BACKWARDS, HOST, UNTRAINED, Kind, Route, Schedule, Value
from pipecompile.ir.directions import all_placements, placement_of
from pipecompile.ir.slices import unit_text
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.host_copies import HostCopies
from pipecompile.simulation.input_copies import add_inputs
from pipecompile.simulation.overlapped_tasks import overlap_tasks
from pipecompile.simulation.sharding_tasks import add_sharding
from pipecompile.simulation.task_graph import Anchor, Change, TaskGraph

__all__ = ["DeviceTransfer", "device_transfers", "tasks_of_schedule"]


@dataclass(frozen=True, slots=True)
class DeviceTransfer:
    """A value from `stage` on device `source` to device `target`, where the stages `readers` read it.

    With a `consumer` it is the gradient that this stage sends back; None for a value. `nbytes` is its size in bytes.
    """

    name: str
    consumer: int | None
    nbytes: float
    stage: int
    source: int
    target: int
    readers: tuple[int, ...]


def device_transfers(routes: Sequence[Route], placement: Sequence[int]) -> Iterator[DeviceTransfer]:
    """Yield all transfers between devices. Inputs are left out (`input_copies.add_inputs`), and outputs, which take no time."""
    for route in routes:
        ends = [end for end in route.consumers if end != HOST]
        if route.source == HOST:
            continue
        source = placement[route.source]
        for target in dict.fromkeys(placement[end] for end in ends if placement[end] != source):
            readers = tuple(end for end in ends if placement[end] == target)
            yield DeviceTransfer(route.value, None, route.nbytes, route.source, source, target, readers)
        for end in route.senders:
            if end != HOST and placement[end] != source:
                yield DeviceTransfer(route.value, end, route.nbytes, end, placement[end], source, (route.source,))


def tasks_of_schedule(schedule: Schedule, routes: Sequence[Route], costs: Costs) -> TaskGraph:
    """Return the tasks of a legal schedule. Memory counts what stages save, not the buffers of values. Linear."""
    transfers, messages = _of_directions(schedule, routes)
    own, moved = messages[schedule.placement], placement_of(schedule)
    tasks = TaskGraph(changes=[[] for _ in schedule.rows])
    for row in schedule.rows:
        first = len(tasks.seconds)
        for action in row:
            of_stages = messages[moved[action.microbatch]] if action.microbatch in moved else own
            (needs, sends), unit = of_stages[action.stage][action.kind], action.unit(schedule.n_slices)
            tasks.needs.append(needs[unit])
            tasks.sends.append(sends[unit])
            tasks.seconds.append(costs.action_seconds(action))
        tasks.actions += row
        tasks.rows.append(range(first, len(tasks.seconds)))
        tasks.first_sends.append(())
        tasks.inputs.append([])
    _number_messages(tasks, transfers, schedule, costs)
    if any(costs.saved) or any(costs.weight_saved) or any(costs.recipe):
        tasks.changes = _changes(schedule, costs)
    _add_beside(tasks, schedule, routes, costs)
    return tasks


def _number_messages(tasks: TaskGraph, transfers: Sequence[DeviceTransfer], schedule: Schedule, costs: Costs) -> None:
    """Add the messages of all transfers, transfer by transfer, and of each those of all units."""
    m, n_slices = schedule.n_units, schedule.n_slices
    shares = (1.0,) if costs.slices is None else costs.slices.bytes
    for t in transfers:
        tasks.links += [(t.source, t.target)] * m
        seconds = [costs.message(t.name, t.nbytes, t.source, t.target, share) for share in shares]
        tasks.delays += seconds * schedule.n_microbatches
    names = [str(Value(t.name, 0, t.consumer))[:-1] for t in transfers]
    tasks.label = lambda message: names[message // m] + unit_text(message % m, n_slices)


def _add_beside(tasks: TaskGraph, schedule: Schedule, routes: Sequence[Route], costs: Costs) -> None:
    """Add copies to and from the host, collectives of the copies of the pipeline, and what overlaps."""
    if costs.has_input_seconds:
        add_inputs(tasks, routes, costs)
    if any(action.kind is Kind.OFFLOAD for row in schedule.rows for action in row):
        HostCopies.of(schedule, len(tasks.delays)).add_to(tasks, schedule, costs)
    if costs.sharding is not None:
        add_sharding(tasks, costs.sharding)
    if schedule.overlaps:
        overlap_tasks(tasks, schedule.overlaps, costs)


def _of_directions(
    schedule: Schedule, routes: Sequence[Route]
) -> tuple[list[DeviceTransfer], dict[tuple[int, ...], list[Messages]]]:
    """Return the transfers of all directions, and per placement the messages of each stage. Micro-batches leave out the messages of
    other directions than theirs.
    """
    transfers: list[DeviceTransfer] = []
    messages: dict[tuple[int, ...], list[Messages]] = {}
    for placement in dict.fromkeys(all_placements(schedule)):
        own, first = list(device_transfers(routes, placement)), len(transfers)
        messages[placement] = _messages(own, schedule.n_stages, schedule.n_units, first)
        transfers += own
    return transfers, messages


MessageNumbers = list[tuple[int, ...]]
"""Per unit, a micro-batch or a slice, the numbers of messages. Transfer t of unit m is message t * M + m of M units."""


Messages = dict[Kind, tuple[MessageNumbers, MessageNumbers]]
"""Per kind of action, the messages that it needs and the messages that it sends."""


def _messages(transfers: Sequence[DeviceTransfer], n_stages: int, m: int, first: int) -> list[Messages]:
    """Return, per stage, its messages; `first` is the number of the first transfer."""
    needs: list[dict[Kind, list[int]]] = [{kind: [] for kind in Kind} for _ in range(n_stages)]
    sends: list[dict[Kind, list[int]]] = [{kind: [] for kind in Kind} for _ in range(n_stages)]
    for index, transfer in enumerate(transfers, first):
        for kind in (Kind.FORWARD,) if transfer.consumer is None else BACKWARDS:
            sends[transfer.stage][kind].append(index * m)
            for reader in transfer.readers:
                needs[reader][kind].append(index * m)
    return [
        {kind: (_numbered(needs[s][kind], m), _numbered(sends[s][kind], m)) for kind in Kind} for s in range(n_stages)
    ]


def _numbered(starts: list[int], m: int) -> MessageNumbers:
    return list(zip(*(range(start, start + m) for start in starts), strict=True)) if starts else [()] * m


def _changes(schedule: Schedule, costs: Costs) -> list[list[Change]]:
    """Return the memory of what stages save: from the start of the saving action to the end of the last action that needs it."""
    recomputed = {a.cell for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE}
    trained = {a.stage for row in schedule.rows for a in row if a.kind not in UNTRAINED}
    task = 0
    per_device = []
    for row in schedule.rows:
        changes: list[Change] = []
        for action in row:
            s, start, end = action.stage, ((Anchor.TASK_START, task),), ((Anchor.TASK_END, task),)
            task, share = task + 1, costs.byte_share(action)
            match action.kind:
                case Kind.FORWARD if s in trained:
                    kept = costs.recipe if action.cell in recomputed else costs.saved
                    changes.append((start, kept[s] * share))
                case Kind.RECOMPUTE:
                    changes += ((start, costs.saved[s] * share), (end, -costs.recipe[s] * share))
                case Kind.BACKWARD:
                    changes.append((end, -costs.saved[s] * share))
                case Kind.INPUT_GRAD:
                    changes.append((end, (costs.weight_saved[s] - costs.saved[s]) * share))
                case Kind.WEIGHT_GRAD:
                    changes.append((end, -costs.weight_saved[s] * share))
        per_device.append(changes)
    return per_device
