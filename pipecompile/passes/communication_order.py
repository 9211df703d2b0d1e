"""Order the communication so that no device waits forever in any model of `verifiers/message_models.py`.

    before   device 0   0F1  SEND v#1 to 1    RECV v'1#0 from 1  0B0        both wait to be received: neither
             device 1   1B0  SEND v'1#0 to 0  RECV v#1 from 0    1F1        reaches its own receive
    after    device 1   1B0  RECV v#1 from 0  SEND v'1#0 to 0    1F1

Sends stay after the computation of their values. Receives are posted before their readers, or earlier:

- *late* (`ahead` 0): only as early as needed. Devices are walked as if every send met its receive. When devices are
  stuck in a cycle, the oldest message of the cycle is received at once, before the instruction where its receiver is
  stuck. The oldest message is the first to be sent if every F, I and W takes the same time.
- *early* (`ahead` n): directly after the previous message of the row, while at most n posted values are unread beside
  the next. All rows have their messages in one order, that of sending if every F, I and W takes the same time.

Both result in an order of meetings on which all rows agree, so that no waits form a cycle. Linear in the number of
instructions, and in the number of devices per cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from pipecompile.ir import HOST, Instruction, Op, Program, Value
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_program import tasks_and_messages

__all__ = ["broken_cycles", "order_meetings"]


def order_meetings(program: Program, ahead: int = 0) -> Program:
    """Return the same instructions with receives moved. The program must be legal if sends never wait."""
    moved = _early(program, ahead) if ahead else _MeetingWalk(program).run()
    return replace(program, rows=tuple(tuple(_placed(*each)) for each in zip(program.rows, moved, strict=True)))


Key = tuple[Value, int, int]
"""A message: the value, the sending device, the receiving device."""

Place = tuple[int, int]
"""A device and an index in its row."""

Moved = dict[int, list[int]]
"""Maps an index in the row to the indices of the receives that move before it."""


def broken_cycles(program: Program) -> dict[Key, tuple[list[Place], int]]:
    """Return, per message that is received early, the cycle of waits that this breaks, and the index in the receiver's row where
    the receiver is stuck. A cycle has a (device, index in its row) per wait, in which each waits for the next.
    """
    meetings = _MeetingWalk(program)
    meetings.run()
    return meetings.cycles


def _placed(row: Sequence[Instruction], moved: Moved) -> Iterator[Instruction]:
    gone = {index for indices in moved.values() for index in indices}
    for index, instruction in enumerate(row):
        yield from (row[receive] for receive in moved.get(index, ()))
        if index not in gone:
            yield instruction


def _key(instruction: Instruction, device: int) -> Key | None:
    """Return the message of a SEND or RECV between devices, None for other instructions."""
    peer = instruction.peer
    if peer is None or peer == HOST:
        return None
    if instruction.op is Op.SEND:
        return instruction.reads[0].value, device, peer
    return instruction.writes[0].value, peer, device


def _sending_order(program: Program) -> dict[Key, int]:
    """Return the position of each message in sending order at unit times."""
    costs = make_costs(program.n_stages, program.n_devices, program.routes, program.ties)
    tasks, messages = tasks_and_messages(program, costs)
    sent = (messages[number] for number in walk(tasks).order)
    return {
        (value, source, target): position
        for position, (value, source, target) in enumerate(sent)
        if isinstance(value, Value)
    }


Meeting = tuple[int, bool, Key, int]
"""A meeting of two devices: the index in the row, whether the device sends, the message, the other device."""


class _MeetingWalk:
    """The late placement of receives: walk all devices, and break each cycle of waits as it closes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines = [list(_meetings(row, device)) for device, row in enumerate(program.rows)]
        self.position = [0] * program.n_devices
        self.is_stuck = [False] * program.n_devices
        self.received_early: set[Key] = set()
        self.moved: list[Moved] = [{} for _ in program.rows]
        self.ready: list[int] = []
        self.cycles: dict[Key, tuple[list[Place], int]] = {}

    def run(self) -> list[Moved]:
        self.ready = list(range(self.program.n_devices))
        while self.ready:
            self._advance_until_stuck(self.ready.pop())
        return self.moved

    def _advance_until_stuck(self, device: int) -> None:
        """Meet other devices until none is ready, then break the cycle of waits if there is one."""
        while (here := self._next(device)) is not None:
            there = self._next(here[3])
            if there is None or there[2] != here[2]:
                self.is_stuck[device] = True
                if cycle := self._cycle(device):
                    self._release(cycle)
                return
            self.position[device] += 1
            self._step(here[3])

    def _step(self, device: int) -> None:
        self.position[device] += 1
        self.is_stuck[device] = False
        self.ready.append(device)

    def _next(self, device: int) -> Meeting | None:
        """Return the next meeting of a device, skipping receives that were moved."""
        line, position = self.lines[device], self.position[device]
        while position < len(line) and not line[position][1] and line[position][2] in self.received_early:
            position += 1
        self.position[device] = position
        return line[position] if position < len(line) else None

    def _cycle(self, device: int) -> list[Meeting]:
        """Return the cycle of waits through a stuck device, empty if there is none."""
        path: list[Meeting] = []
        other = device
        while self.is_stuck[other] and (meeting := self._next(other)) is not None:
            path.append(meeting)
            other = meeting[3]
            if other == device:
                return path
        return []

    def _release(self, cycle: list[Meeting]) -> None:
        """Receive the oldest message sent in the cycle now, before the instruction where its receiver is stuck."""
        key = min((key for _, is_send, key, _ in cycle if is_send), key=self.sent_at.__getitem__)
        _, source, target = key
        here = self._next(target)
        assert here is not None
        self.moved[target].setdefault(here[0], []).append(self.receives[key])
        self.received_early.add(key)
        self.cycles[key] = [(cycle[i - 1][3], meeting[0]) for i, meeting in enumerate(cycle)], here[0]
        self._step(source)

    @cached_property
    def sent_at(self) -> dict[Key, int]:
        return _sending_order(self.program)

    @cached_property
    def receives(self) -> dict[Key, int]:
        return {key: index for line in self.lines for index, is_send, key, _ in line if not is_send}


def _meetings(row: Sequence[Instruction], device: int) -> Iterator[Meeting]:
    for index, instruction in enumerate(row):
        if (key := _key(instruction, device)) is not None:
            is_send = instruction.op is Op.SEND
            yield index, is_send, key, key[2] if is_send else key[1]


def _early(program: Program, ahead: int) -> list[Moved]:
    sent_at = _sending_order(program)
    return [_advanced(row, d, sent_at, ahead) for d, row in enumerate(program.rows)]


def _advanced(row: Sequence[Instruction], device: int, sent_at: dict[Key, int], ahead: int) -> Moved:
    """Return the receives to move: in sending order, each before its reader and before later readers."""
    keys = {index: key for index, instruction in enumerate(row) if (key := _key(instruction, device))}
    queue = sorted((sent_at[key], index) for index, key in keys.items() if row[index].op is Op.RECV)
    sends = iter(index for index in keys if row[index].op is Op.SEND)
    deadlines = list(accumulate((_reader(row, index) for _, index in reversed(queue)), min))[::-1]
    moved: Moved = {}
    unread: set[Value] = set()
    posted, send = 0, next(sends, len(row))
    for index, instruction in enumerate(row):
        while posted < len(queue) and (send == len(row) or queue[posted][0] < sent_at[keys[send]]):
            if len(unread) > ahead and index != send and deadlines[posted] > index:
                break
            receive = queue[posted][1]
            moved.setdefault(_begin(row, index), []).append(receive)
            unread.add(row[receive].writes[0].value)
            posted += 1
        if index == send:
            send = next(sends, len(row))
        unread.difference_update([operand.value for operand in instruction.reads])
    return moved


def _begin(row: Sequence[Instruction], index: int) -> int:
    """Return the index of an instruction, or that of the action with which it overlaps."""
    return index - 1 if index and row[index - 1].overlaps else index


def _reader(row: Sequence[Instruction], receive: int) -> int:
    """The place of the first instruction that reads what is received there."""
    (operand,) = row[receive].writes
    return next(i for i in range(receive + 1, len(row)) if operand in row[i].reads)
