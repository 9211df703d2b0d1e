"""Simulation of many devices by arrays: in one wave, each device whose next task has all messages runs this task.

    wave      0     1     2     3     4          a wave is a few operations on arrays with an item per device that goes on,
    row 0    0F0   0F1   0F2    .    0B0         so that a wave of 512 devices takes little longer than one of 4
    row 1     .    1F0   1F1   1B0   1F2

The times are those of `row_walk.walk_rows` to the last bit: the same sums and maxima, for links that have one sender. Rows are built from
the parts of a periodic schedule, without an object per action. Linear in tasks, and in waves; there are about 2 (P + M).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipecompile.errors import VerifyError
from pipecompile.ir import Action, Kind, Route
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.from_schedule import DeviceTransfer, device_transfers

__all__ = ["ArrayRun", "ScheduleArrays"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = NDArray[Any]

_KINDS = {kind: number for number, kind in enumerate(Kind)}
_SENDING = {True: (Kind.FORWARD,), False: (Kind.BACKWARD, Kind.INPUT_GRAD)}
"""Kinds that read and send a value (True) or a gradient (False)."""


def _array(row: Sequence[Action]) -> Ints:
    """Return (stage, number of the kind, micro-batch) of each action, shape (3, actions)."""
    columns = [(a.stage, _KINDS[a.kind], a.microbatch) for a in row]
    return np.array(columns, dtype=np.int64).reshape(-1, 3).T


@dataclass(slots=True)
class ArrayRun:
    """A run of repetitions of a period. Per task, row after row from `starts` on: its (stage, kind, micro-batch) in `tasks`, its
    `repetition` (-1 in the prologue), `seconds`, and `end` in seconds. Per message: `arrival` in seconds. `needs` and `sends` have the
    messages of each task, shape (tasks, most of a task); the last message stands for none.
    """

    tasks: Ints
    starts: Ints
    repetition: Ints
    seconds: Floats
    needs: Ints
    sends: Ints
    end: Floats = field(init=False)
    arrival: Floats = field(init=False)

    @property
    def makespan(self) -> float:
        return float(max(self.end.max(initial=0.0), self.arrival.max(initial=0.0)))


class ScheduleArrays:
    """A periodic schedule under costs, ready to be run with any number of repetitions."""

    def __init__(self, schedule: PeriodicSchedule, routes: Sequence[Route], costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        parts = schedule.prologue, schedule.period, schedule.epilogue
        self.parts = [
            (_array(before), _array(period), _array(after)) for before, period, after in zip(*parts, strict=True)
        ]
        self.transfers = list(device_transfers(routes, schedule.placement))
        self.needs = self._table([(t, reader) for t in self.transfers for reader in t.readers])
        self.sends = self._table([(t, t.stage) for t in self.transfers])
        self.seconds = np.array([costs.seconds[kind] for kind in Kind])
        self.delays = np.array([costs.message(t.name, t.nbytes, t.source, t.target) for t in self.transfers])
        links = {
            link: number for number, link in enumerate(dict.fromkeys((t.source, t.target) for t in self.transfers))
        }
        self.links = np.array([links[t.source, t.target] for t in self.transfers], dtype=np.int64)

    def _table(self, uses: Sequence[tuple[DeviceTransfer, int]]) -> Ints:
        """Return the numbers of the transfers that an action needs, or sends, shape (stages, kinds, most of an action); -1 for none."""
        numbers = {id(transfer): number for number, transfer in enumerate(self.transfers)}
        of: dict[tuple[int, int], list[int]] = {}
        for transfer, stage in uses:
            for kind in _SENDING[transfer.consumer is None]:
                of.setdefault((stage, _KINDS[kind]), []).append(numbers[id(transfer)])
        table = np.full((self.schedule.n_stages, len(_KINDS), max(map(len, of.values()), default=1)), -1)
        for (stage, number), own in of.items():
            table[stage, number, : len(own)] = own
        return table

    def run(self, count: int) -> ArrayRun:
        """Return the run with `count` repetitions. Raise VerifyError if a device waits forever."""
        step = self.schedule.step
        m = self.schedule.n_microbatches + step * (count - self.schedule.repetitions)
        rows = [_row(*parts, count, step) for parts in self.parts]
        tasks = np.concatenate([row for row, _ in rows], axis=1)
        starts = np.cumsum([0, *(row.shape[1] for row, _ in rows)])
        stages, kinds, microbatches = tasks
        none = len(self.transfers) * m
        needs, sends = (
            np.where(table >= 0, table * m + microbatches[:, None], none)
            for table in (self.needs[stages, kinds], self.sends[stages, kinds])
        )
        repetition = np.concatenate([each for _, each in rows])
        run = ArrayRun(tasks, starts, repetition, self.seconds[kinds, stages], needs, sends)
        self._walk(run, none, m)
        return run

    def _walk(self, run: ArrayRun, none: int, m: int) -> None:
        run.end, run.arrival = np.zeros(len(run.seconds)), np.full(none + 1, -1.0)
        run.arrival[none] = 0.0
        busy = np.zeros(int(self.links.max(initial=0)) + 1)
        position, now = run.starts[:-1].copy(), np.zeros(len(run.starts) - 1)
        rows = np.flatnonzero(position < run.starts[1:])
        while len(rows):
            arrived = run.arrival[run.needs[position[rows]]]
            goes_on = (arrived >= 0).all(axis=1)
            if not goes_on.any():
                raise VerifyError("periodic schedule", ["devices wait for one another"])
            going = rows[goes_on]
            tasks = position[going]
            end = np.maximum(now[going], arrived[goes_on].max(axis=1)) + run.seconds[tasks]
            run.end[tasks] = now[going] = end
            self._send(run, tasks, end, busy, m)
            position[going] += 1
            rows = rows[position[rows] < run.starts[rows + 1]]

    def _send(self, run: ArrayRun, tasks: Ints, ends: Floats, busy: Floats, m: int) -> None:
        """Send the messages of tasks that end: each starts when its link is free. No two tasks of a wave share a link."""
        for column in run.sends[tasks].T:
            is_sent = column < len(run.arrival) - 1
            messages = column[is_sent]
            transfers, begin = messages // m, ends[is_sent]
            delays, links = self.delays[transfers], self.links[transfers]
            takes_time = delays > 0
            begin = np.where(takes_time, np.maximum(begin, busy[links]), begin)
            run.arrival[messages] = begin + delays
            busy[links[takes_time]] = (begin + delays)[takes_time]


def _row(prologue: Ints, period: Ints, epilogue: Ints, count: int, step: int) -> tuple[Ints, Ints]:
    """Return the actions of a row, and the repetition of each: -1 in the prologue, `count` in the epilogue."""
    length, later = period.shape[1], np.array([[0], [0], [step]])
    which = np.repeat(np.arange(count), length)
    middle = np.tile(period, count) + later * which
    numbers = np.full(prologue.shape[1], -1), which, np.full(epilogue.shape[1], count)
    return np.concatenate([prologue, middle, epilogue + later * count], axis=1), np.concatenate(numbers)
