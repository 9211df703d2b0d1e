"""The order of communication by arrays: `order_meetings` without early receives.

    device 0   S a    R b    S c        two devices that have come to the same message meet and go on; of two that wait for each other, and
    device 1   R a    S b    R c        of every other cycle once no device can go on, the oldest message is received at once

A cycle of waits stays as it is while other devices go on, and each device is in one cycle at most. So the receives that move early, and
where they move to, do not depend on the order in which devices go on. Linear in messages, beside cycles of three devices or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipecompile.ir import Op
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.program_arrays import OPS, ProgramArrays, Templates
from pipecompile.simulation.array_walk import ScheduleArrays
from pipecompile.simulation.costs import make_costs

__all__ = ["meeting_rows"]

Ints = NDArray[np.int64]


def meeting_rows(arrays: ProgramArrays, schedule: PeriodicSchedule, count: int) -> ProgramArrays | None:
    """Return the program with receives moved as `order_meetings` moves them; None if some device waits forever.

    The program is that of `schedule` with `count` repetitions, in TRANSFERS.
    """
    walk = _ArrayMeetings(arrays, schedule, count)
    if not walk.run():
        return None
    rows = [(numbers[order], own[order]) for (numbers, own), order in zip(arrays.rows, walk.orders(), strict=True)]
    return replace(arrays, rows=rows)


class _ArrayMeetings:
    """The meetings of all rows, one after the other, and the walk along them.

    Per meeting: `message`, `is_send`, the other device `peer`, and its place `at` in all rows. Per device: the next meeting `position`,
    up to `stop`. `moved` has (place of the instruction, place of the receive that moves before it), in the order of moving.
    """

    def __init__(self, arrays: ProgramArrays, schedule: PeriodicSchedule, count: int) -> None:
        templates = Templates(arrays.table.templates)
        self.arrays, self.schedule, self.count, self.templates = arrays, schedule, count, templates
        numbers, devices = arrays.numbers, arrays.devices
        self.at = np.flatnonzero((templates.message_class[numbers] >= 0) & (templates.peer[numbers] >= 0))
        own, here = numbers[self.at], devices[self.at]
        is_send, peer = templates.op[own] == OPS[Op.SEND], templates.peer[own]
        source, target = np.where(is_send, here, peer), np.where(is_send, peer, here)
        n = len(arrays.rows)
        keys = (templates.message_class[own] * n + source) * n + target
        keys = keys * arrays.n_microbatches + arrays.microbatches[self.at]
        messages = np.unique(keys, return_inverse=True)[1]
        self.is_send, self.peer, self.message = is_send.tolist(), peer.tolist(), messages.tolist()
        bounds = np.searchsorted(here, np.arange(n + 1)).tolist()
        self.position, self.stop = bounds[:-1], bounds[1:]
        self.is_early = [False] * (int(messages.max(initial=-1)) + 1)
        self.moved: list[tuple[int, int]] = []

    def run(self) -> bool:
        """Walk to the end of all rows. Return False if devices are stuck and no cycle can be broken."""
        ready = list(range(len(self.stop)))
        while ready:
            while ready:
                ready += self._go_on(ready.pop())
            ready = self._break_cycles()
        return all(self._next(device) is None for device in range(len(self.stop)))

    def _next(self, device: int) -> int | None:
        """Return the next meeting of a device, past receives that were moved; None at the end of its row."""
        here, stop = self.position[device], self.stop[device]
        while here < stop and not self.is_send[here] and self.is_early[self.message[here]]:
            here += 1
        self.position[device] = here
        return here if here < stop else None

    def _go_on(self, device: int) -> list[int]:
        """Let a device meet others, and break its cycles with one other, until it waits. Return the devices that may continue."""
        others = []
        while (here := self._next(device)) is not None:
            peer = self.peer[here]
            there = self._next(peer)
            if there is not None and self.message[there] == self.message[here]:
                self.position[device] += 1
                self.position[peer] += 1
            elif there is None or self.peer[there] != device or not self._break((here, there)):
                break
            others.append(peer)
        return others

    def _break_cycles(self) -> list[int]:
        """Break all cycles of waits when no device can continue. Return the devices that can continue then."""
        places = {device: here for device in range(len(self.stop)) if (here := self._next(device)) is not None}
        cycles = list(_cycles({device: self.peer[here] for device, here in places.items()}))
        return [device for cycle in cycles for device in self._break([places[device] for device in cycle])]

    def _break(self, cycle: Sequence[int]) -> list[int]:
        """Receive the oldest message that is sent in a cycle of meetings at once, where its receiver is. Return its sender, which goes on; an
        empty list if no message is sent.
        """
        sends = [here for here in cycle if self.is_send[here]]
        if not sends:
            return []
        send = min(sends, key=lambda here: self.ages[self.message[here]])
        message = self.message[send]
        receive = self.receive[message]
        self.moved.append((self.position[self.peer[send]], receive))
        self.is_early[message] = True
        self.position[self.peer[receive]] += 1
        return [self.peer[receive]]

    @cached_property
    def ages(self) -> list[int]:
        """The place of each message in the order of sending at unit times."""
        schedule, arrays = self.schedule, self.arrays
        costs = make_costs(schedule.n_stages, schedule.n_devices, arrays.routes)
        ends = ScheduleArrays(schedule, arrays.routes, costs).run(self.count).end
        task = np.cumsum(self.templates.op[arrays.numbers] == OPS[Op.COMPUTE])[self.at] - 1
        sends = np.flatnonzero(self.is_send)
        order = sends[np.lexsort((sends, ends[task[sends]]))]
        ages = np.zeros(len(self.is_early), dtype=np.int64)
        ages[np.array(self.message)[order]] = np.arange(len(order))
        return ages.tolist()

    @cached_property
    def receive(self) -> list[int]:
        """The meeting in which each message is received."""
        receives = [0] * len(self.is_early)
        for here, message in enumerate(self.message):
            if not self.is_send[here]:
                receives[message] = here
        return receives

    def orders(self) -> Iterator[Ints]:
        """Yield, per row, the indices of its instructions in their new order."""
        before, receives = self.at[np.array(self.moved, dtype=np.int64).reshape(-1, 2).T]
        n = sum(len(numbers) for numbers, _ in self.arrays.rows)
        place = np.arange(n) * 2 + 1
        place[receives] = before * 2
        within = np.zeros(n, dtype=np.int64)
        within[receives] = np.arange(len(receives))
        order, start = np.lexsort((within, place)), 0
        for numbers, _ in self.arrays.rows:
            yield order[start : start + len(numbers)] - start
            start += len(numbers)


def _cycles(awaited: dict[int, int]) -> Iterator[list[int]]:
    """Yield the cycles of devices of which each waits for one other. Linear."""
    seen: dict[int, int] = {}
    for first in awaited:
        path, device = [], first
        while device in awaited and device not in seen:
            seen[device] = first
            path.append(device)
            device = awaited[device]
        if seen.get(device) == first and device in path:
            yield path[path.index(device) :]
