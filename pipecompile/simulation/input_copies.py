"""Copies of inputs from the host to the device that reads them, beside its compute.

    from host   ├ v#0 ┤├ v#1 ┤├ v#2 ┤             ├ v#3 ┤         a copy begins when the one before it is over, and when the device
    device 0           0F0 ──────────────────────┐0F1             has read the input three copies before it: so many buffers are free

They have the link from the host, which copies of RELOAD also use. Without seconds they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipecompile.ir import HOST, Kind, Route
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.task_graph import TaskGraph

__all__ = ["INPUTS_AHEAD", "InputReads", "add_inputs"]

INPUTS_AHEAD = 3
"""Inputs of a name that a device may receive before it has read the first of them: the receive buffers of a launch plan."""


@dataclass(slots=True)
class InputReads:
    """The inputs of one device in the order of its row: per name, how many copies there are, and the tasks that read them first.

    `sender` is the task after which the last copy is sent, -1 for none: copies keep their order.
    """

    sender: int = -1
    count: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)

    def add_copy(self, tasks: TaskGraph, device: int, message: int, name: str) -> None:
        """Send the copy `message` of the next input of a name: after the task that frees its buffer, or first of all."""
        place = self.count.get(name, 0) - INPUTS_AHEAD
        self.count[name] = place + INPUTS_AHEAD + 1
        readers = self.readers.get(name, [])
        if 0 <= place < len(readers):
            self.sender = max(self.sender, readers[place])
        if self.sender < 0:
            tasks.first_sends[device] += (message,)
        else:
            tasks.sends[self.sender] += (message,)
        tasks.inputs[device].append(message)

    def note_read(self, name: str, task: int) -> None:
        """Note the task that reads the next input of a name."""
        self.readers.setdefault(name, []).append(task)


def add_inputs(tasks: TaskGraph, routes: Sequence[Route], costs: Costs) -> None:
    """Add the copies of the inputs on `routes` to the task graph of a schedule. The messages of the graph must be numbered."""
    inputs = [route for route in routes if route.source == HOST and costs.input_seconds(route.nbytes)]
    first, label, names = len(tasks.links), tasks.label, list[str]()
    for device, row in enumerate(tasks.rows):
        reads, arriving = InputReads(), dict[tuple[str, str], int]()
        for task in row:
            action = tasks.actions[task]
            if action is None or action.kind is not Kind.FORWARD:
                continue
            for route in (route for route in inputs if action.stage in route.consumers):
                key = route.value, action.part
                if key not in arriving:
                    arriving[key] = len(tasks.links)
                    tasks.links.append((HOST, device))
                    tasks.delays.append(costs.input_seconds(route.nbytes * costs.byte_share(action)))
                    names.append("#".join(key))
                    reads.add_copy(tasks, device, arriving[key], route.value)
                    reads.note_read(route.value, task)
                tasks.needs[task] += (arriving[key],)
    tasks.label = lambda message: label(message) if message < first else names[message - first]
