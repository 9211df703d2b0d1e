"""The order of communication by arrays: `order_meetings` without early receives, in waves.

    wave       0      1      2          in one wave, every two devices that have come to the same message meet and go on; of every two
    device 0   S a    R b    S c        that wait for each other, and of every other cycle once no device can go on, the oldest message
    device 1   R a    S b    R c        is received at once

A cycle of waits stays as it is while other devices go on, and each device is in one cycle at most. So the receives that move early, and
where they move to, do not depend on the order in which devices go on. A wave is linear in devices that go on; there are about as many
waves as messages on the longest chain.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Return the program with receives moved as `order_meetings` moves them; None if some device waits for ever.

    The program is that of `schedule` with `count` repetitions, in TRANSFERS.
    """
    walk = _WaveWalk(arrays, schedule, count)
    if not walk.run():
        return None
    rows = [(numbers[order], own[order]) for (numbers, own), order in zip(arrays.rows, walk.orders(), strict=True)]
    return replace(arrays, rows=rows)


class _WaveWalk:
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
        self.is_send, self.peer = templates.op[own] == OPS[Op.SEND], templates.peer[own]
        source, target = np.where(self.is_send, here, self.peer), np.where(self.is_send, self.peer, here)
        n = len(arrays.rows)
        keys = (templates.message_class[own] * n + source) * n + target
        keys = keys * arrays.n_microbatches + arrays.microbatches[self.at]
        _, self.message = np.unique(keys, return_inverse=True)
        bounds = np.searchsorted(here, np.arange(n + 1))
        self.position, self.stop = bounds[:-1].copy(), bounds[1:]
        self.is_early = np.zeros(int(self.message.max(initial=-1)) + 1, dtype=bool)
        self.moved: list[Ints] = []

    def run(self) -> bool:
        """Walk to the end of all rows. Return False if devices are stuck and no cycle can be broken."""
        while len(devices := self._going()):
            here = self.position[devices]
            peers = self.peer[here]
            there = self.position[peers]
            is_left = there < self.stop[peers]
            there = np.where(is_left, there, here)
            is_met = is_left & (self.message[there] == self.message[here])
            is_pair = is_left & ~is_met & (self.peer[there] == devices)
            self.position[devices[is_met]] += 1
            if is_pair.any():
                is_broken = self._break_pairs(here[is_pair], there[is_pair])
            else:
                is_broken = is_met.any() or self._break_cycles(devices, peers)
            if not is_broken:
                return False
        return True

    def _going(self) -> Ints:
        """Return the devices that have a meeting left, past receives that were moved."""
        devices = np.flatnonzero(self.position < self.stop)
        past = devices
        while len(past):
            here = self.position[past]
            past = past[~self.is_send[here] & self.is_early[self.message[here]]]
            self.position[past] += 1
            past = past[self.position[past] < self.stop[past]]
        return devices[self.position[devices] < self.stop[devices]]

    def _break_pairs(self, here: Ints, there: Ints) -> bool:
        """Break the cycles of two devices that wait for each other, at these meetings; each cycle is there twice. Return whether there is
        a message to receive in one of them.
        """
        ages = [
            np.where(self.is_send[each], self.ages[self.message[each]], len(self.is_early)) for each in (here, there)
        ]
        sends = here[ages[0] < ages[1]]
        self._receive_early(sends)
        return bool(len(sends))

    def _break_cycles(self, devices: Ints, peers: Ints) -> bool:
        """Receive the oldest message of every cycle of waits. Return whether there was a cycle."""
        awaited = dict(zip(devices.tolist(), peers.tolist(), strict=True))
        oldest = []
        for cycle in _cycles(awaited):
            here = self.position[cycle]
            sends = here[self.is_send[here]]
            oldest += [sends[np.argmin(self.ages[self.message[sends]])]] if len(sends) else []
        self._receive_early(np.array(oldest, dtype=np.int64))
        return bool(oldest)

    def _receive_early(self, sends: Ints) -> None:
        """Receive messages at once, where their receivers are, and let their senders go on."""
        targets, receives = self.peer[sends], self.receive[self.message[sends]]
        self.moved.append(np.stack([self.at[self.position[targets]], self.at[receives]]))
        self.is_early[self.message[sends]] = True
        self.position[self.peer[receives]] += 1

    @cached_property
    def ages(self) -> Ints:
        """The place of each message in the order of sending at unit times."""
        schedule, arrays = self.schedule, self.arrays
        costs = make_costs(schedule.n_stages, schedule.n_devices, arrays.routes)
        ends = ScheduleArrays(schedule, arrays.routes, costs).run(self.count).end
        task = np.cumsum(self.templates.op[arrays.numbers] == OPS[Op.COMPUTE])[self.at] - 1
        sends = np.flatnonzero(self.is_send)
        order = sends[np.lexsort((sends, ends[task[sends]]))]
        ages = np.zeros(len(self.is_early), dtype=np.int64)
        ages[self.message[order]] = np.arange(len(order))
        return ages

    @cached_property
    def receive(self) -> Ints:
        """The meeting in which each message is received."""
        receives = np.flatnonzero(~self.is_send)
        receive = np.zeros(len(self.is_early), dtype=np.int64)
        receive[self.message[receives]] = receives
        return receive

    def orders(self) -> Iterator[Ints]:
        """Yield, per row, the indices of its instructions in their new order."""
        before, receives = np.concatenate([np.zeros((2, 0), dtype=np.int64), *self.moved], axis=1)
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
