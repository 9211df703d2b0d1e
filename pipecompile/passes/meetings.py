"""Order the communication so that no device waits for ever, however messages travel: when sends never wait, when a send
waits until its receive is posted, and when messages between two devices are taken in the order in which they were sent.

    before   device 0   0F1  SEND v#1 to 1    RECV v'1#0 from 1  0B0        both wait to be received: neither
             device 1   1B0  SEND v'1#0 to 0  RECV v#1 from 0    1F1        comes to its own receive
    after    device 1   1B0  RECV v#1 from 0  SEND v'1#0 to 0    1F1

Sends stay where values are made. Receives are posted where they are read, or earlier:

- *late* (`ahead` 0): only as early as it must be. The devices are walked as if every send met its receive. Where they are
  stuck in a cycle, the message that has been ready for longest is received at once, ahead of what its receiver is stuck at.
- *early* (`ahead` n): as soon as the message before it in the row is through, while no more than n are posted that will be
  read later than the next. All rows have their messages in one order, that in which they are made when every F, I and W takes the same time.

Both leave an order of meetings that all rows agree on, so there is no cycle of waits. Linear in the number of
instructions, and of devices per cycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from pipecompile.ir import HOST, Instruction, Op, Program, Value
from pipecompile.simulation.costs import make_costs
from pipecompile.simulation.from_program import tasks_and_messages
from pipecompile.simulation.walk import walk

__all__ = ["order_meetings"]


def order_meetings(program: Program, ahead: int = 0) -> Program:
    """The same instructions, receives at other places. The program must be legal when sends never wait."""
    moved = _early(program, ahead) if ahead else _Walk(program).run()
    return replace(program, rows=tuple(tuple(_placed(*each)) for each in zip(program.rows, moved, strict=True)))


Key = tuple[Value, int, int]
"""A message: the value, from, to."""

Moved = dict[int, list[int]]
"""By the place in the row that they now come before: receives, by the place where they were."""


def _placed(row: Sequence[Instruction], moved: Moved) -> Iterator[Instruction]:
    gone = {index for indices in moved.values() for index in indices}
    for index, instruction in enumerate(row):
        yield from (row[receive] for receive in moved.get(index, ()))
        if index not in gone:
            yield instruction


def _key(instruction: Instruction, device: int) -> Key | None:
    """The message of a SEND or RECV between devices."""
    peer = instruction.peer
    if peer is None or peer == HOST:
        return None
    if instruction.op is Op.SEND:
        return instruction.reads[0].value, device, peer
    return instruction.writes[0].value, peer, device


def _made(program: Program) -> dict[Key, tuple[float, int]]:
    """When each message is made at unit times; the number of the message tells equal times apart."""
    costs = make_costs(program.n_stages, program.n_devices, program.routes, program.ties)
    tasks, messages = tasks_and_messages(program, costs)
    start = walk(tasks).message_start
    return {
        (what, source, target): (start[number], number)
        for number, (what, source, target) in enumerate(messages)
        if isinstance(what, Value)
    }


class _Walk:
    """Late receives: devices walk until each has met all that it has to, or all are stuck."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines = [
            [
                (index, instruction.op is Op.SEND, key)
                for index, instruction in enumerate(row)
                if (key := _key(instruction, d))
            ]
            for d, row in enumerate(program.rows)
        ]
        self.at = [0] * program.n_devices
        self.taken: set[Key] = set()
        self.moved: list[Moved] = [{} for _ in program.rows]

    def run(self) -> list[Moved]:
        ready = list(range(self.program.n_devices))
        while True:
            while ready:
                self._go_on(ready.pop(), ready)
            stuck = [d for d in range(self.program.n_devices) if self._head(d) is not None]
            if not stuck:
                return self.moved
            for cycle in _cycles({d: self._peer(d) for d in stuck}):
                ready.append(self._release(cycle))

    def _head(self, device: int) -> tuple[int, bool, Key] | None:
        """What a device comes to next; receives that were taken already are passed."""
        line, at = self.lines[device], self.at[device]
        while at < len(line) and not line[at][1] and line[at][2] in self.taken:
            at += 1
        self.at[device] = at
        return line[at] if at < len(line) else None

    def _peer(self, device: int) -> int:
        head = self._head(device)
        assert head is not None
        _, is_send, (_, source, target) = head
        return target if is_send else source

    def _go_on(self, device: int, ready: list[int]) -> None:
        while (head := self._head(device)) is not None:
            peer = self._peer(device)
            other = self._head(peer)
            if other is None or other[2] != head[2]:
                return
            self.at[device] += 1
            self.at[peer] += 1
            ready.append(peer)

    def _release(self, cycle: list[int]) -> int:
        """Of the sends that are stuck in the cycle the oldest is received now. Returns its device."""
        heads = [(head, d) for d in cycle if (head := self._head(d)) is not None and head[1]]
        (_, _, key), device = min(heads, key=lambda each: self.made[each[0][2]])
        here = self._head(key[2])
        assert here is not None
        self.moved[key[2]].setdefault(here[0], []).append(self.receives[key])
        self.taken.add(key)
        self.at[device] += 1
        return device

    @cached_property
    def made(self) -> dict[Key, tuple[float, int]]:
        return _made(self.program)

    @cached_property
    def receives(self) -> dict[Key, int]:
        return {key: index for line in self.lines for index, is_send, key in line if not is_send}


def _cycles(waits: dict[int, int]) -> Iterator[list[int]]:
    """Everybody waits for one other: follow the waits until somebody comes again."""
    seen: dict[int, int] = {}
    for start in waits:
        path, device = [], start
        while device not in seen:
            seen[device] = start
            path.append(device)
            device = waits[device]
        if seen[device] == start and device in path:
            yield path[path.index(device) :]


def _early(program: Program, ahead: int) -> list[Moved]:
    made = _made(program)
    return [_advanced(row, d, made, ahead) for d, row in enumerate(program.rows)]


def _advanced(row: Sequence[Instruction], device: int, made: dict[Key, tuple[float, int]], ahead: int) -> Moved:
    """Receives and sends in the order in which they are made; a receive never after its reader, or a reader of the next."""
    keys = {index: key for index, instruction in enumerate(row) if (key := _key(instruction, device))}
    queue = sorted((made[key], index) for index, key in keys.items() if row[index].op is Op.RECV)
    sends = iter(index for index in keys if row[index].op is Op.SEND)
    deadlines = list(accumulate((_reader(row, index) for _, index in reversed(queue)), min))[::-1]
    moved: Moved = {}
    unread: set[Value] = set()
    posted, send = 0, next(sends, len(row))
    for index, instruction in enumerate(row):
        while posted < len(queue) and (send == len(row) or queue[posted][0] < made[keys[send]]):
            if len(unread) > ahead and index != send and deadlines[posted] > index:
                break
            receive = queue[posted][1]
            moved.setdefault(index, []).append(receive)
            unread.add(row[receive].writes[0].value)
            posted += 1
        if index == send:
            send = next(sends, len(row))
        unread.difference_update([operand.value for operand in instruction.reads])
    return moved


def _reader(row: Sequence[Instruction], receive: int) -> int:
    """The place of the first instruction that reads what is received there."""
    (operand,) = row[receive].writes
    return next(i for i in range(receive + 1, len(row)) if operand in row[i].reads)
