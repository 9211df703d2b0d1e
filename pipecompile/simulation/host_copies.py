"""Copies to and from the host in the task graph of a schedule: OFFLOAD and RELOAD take no time on the device, their copies do.

device      F ── OFFLOAD ── ... ── RELOAD ── ... ── B        RELOAD waits for the copy out, B waits for the copy back
to host            ╰─ @s.h ─╯
from host                            ╰─ @s ─╯                the memory is free in between
"""

from __future__ import annotations

from dataclasses import dataclass

from pipecompile.ir import BACKWARDS, HOST, NO_SLICE, Action, Kind, Schedule, held, saved
from pipecompile.ir.directions import placement_of
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.task_graph import Anchor, Change, TaskGraph

__all__ = ["HostCopies"]


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The two messages of each cell that is offloaded: `out`, to the host, and the next number, back.

    `first` is the number of the first message; `out` maps (stage, micro-batch, slice) to the number of its copy out. With several
    slices per micro-batch, the backward of the last one waits for the copies back of all of them, whose keys and values it reads.
    """

    first: int
    out: dict[tuple[int, int, int], int]
    n_slices: int = 1

    @classmethod
    def of(cls, schedule: Schedule, first: int) -> HostCopies:
        """Return the copies of a schedule, numbered from `first` on."""
        cells = [a.cell for row in schedule.rows for a in row if a.kind is Kind.OFFLOAD]
        return cls(first, {cell: first + 2 * place for place, cell in enumerate(cells)}, schedule.n_slices)

    def needs(self, action: Action) -> tuple[int, ...]:
        """Return the copies that an action waits for."""
        if action.kind in BACKWARDS and action.slice == self.n_slices - 1:
            cells = ((action.stage, action.microbatch, place) for place in range(self.n_slices))
            return tuple(self.out[cell] + 1 for cell in cells if cell in self.out)
        if (out := self.out.get(action.cell)) is None:
            return ()
        return (out,) if action.kind is Kind.RELOAD else (out + 1,) if action.kind in BACKWARDS else ()

    def sends(self, action: Action) -> tuple[int, ...]:
        """Return the copies that begin after an action."""
        if (out := self.out.get(action.cell)) is None:
            return ()
        return (out,) if action.kind is Kind.OFFLOAD else (out + 1,) if action.kind is Kind.RELOAD else ()

    def change(self, action: Action, task: int, size: float) -> Change:
        """Return the change of memory at an OFFLOAD or a RELOAD, which is number `task`, of `size` bytes."""
        out = self.out[action.cell]
        if action.kind is Kind.OFFLOAD:
            return ((Anchor.TASK_END, task), (Anchor.MESSAGE_END, out)), -size
        return ((Anchor.TASK_END, task), (Anchor.MESSAGE_START, out + 1)), size

    def add_to(self, tasks: TaskGraph, schedule: Schedule, costs: Costs) -> None:
        """Add the messages to a task graph that has those between devices, and the changes of memory."""
        for device, (tasks_of_row, row) in enumerate(zip(tasks.rows, schedule.rows, strict=True)):
            for task, action in zip(tasks_of_row, row, strict=True):
                tasks.needs[task] += self.needs(action)
                tasks.sends[task] += self.sends(action)
                if action.kind in (Kind.OFFLOAD, Kind.RELOAD) and (size := costs.saved[action.stage]):
                    tasks.changes[device].append(self.change(action, task, size * costs.byte_share(action)))
        moved = placement_of(schedule)
        for stage, microbatch, place in self.out:
            device = moved.get(microbatch, schedule.placement)[stage]
            share = costs.slices.of_bytes(place) if costs.slices else 1.0
            tasks.links += [(device, HOST), (HOST, device)]
            tasks.delays += [costs.offload_seconds(stage) * share] * 2
        cells, label, first = list(self.out), tasks.label, self.first

        def named(message: int) -> str:
            if message < first:
                return label(message)
            place, is_back = divmod(message - first, 2)
            stage, microbatch, part = cells[place]
            name = str((saved if is_back else held)(stage, microbatch))
            return name if part == NO_SLICE else f"{name}.{part}"

        tasks.label = named
