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
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_program import tasks_and_messages

__all__ = ["order_meetings"]


def order_meetings(program: Program, ahead: int = 0) -> Program:
    """The same instructions, receives at other places. The program must be legal when sends never wait."""
    moved = _early(program, ahead) if ahead else _MeetingWalk(program).run()
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


def _made(program: Program) -> dict[Key, int]:
    """The messages in the order in which they are sent at unit times."""
    costs = make_costs(program.n_stages, program.n_devices, program.routes, program.ties)
    tasks, messages = tasks_and_messages(program, costs)
    sent = (messages[number] for number in walk(tasks).order)
    return {
        (what, source, target): place for place, (what, source, target) in enumerate(sent) if isinstance(what, Value)
    }


Stop = tuple[int, bool, Key, int]
"""Where a device meets another: the place in its row, whether it sends, the message, the other device."""


class _MeetingWalk:
    """Late receives: devices go on until each has met all that it has to; a cycle of waits is opened when it closes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines = [list(_stops(row, device)) for device, row in enumerate(program.rows)]
        self.at = [0] * program.n_devices
        self.is_stuck = [False] * program.n_devices
        self.taken: set[Key] = set()
        self.moved: list[Moved] = [{} for _ in program.rows]
        self.ready: list[int] = []

    def run(self) -> list[Moved]:
        self.ready = list(range(self.program.n_devices))
        while self.ready:
            self._go_on(self.ready.pop())
        return self.moved

    def _go_on(self, device: int) -> None:
        """Meet all that are there; stuck then, perhaps in a cycle."""
        while (here := self._next(device)) is not None:
            there = self._next(here[3])
            if there is None or there[2] != here[2]:
                self.is_stuck[device] = True
                if cycle := self._cycle(device):
                    self._release(cycle)
                return
            self.at[device] += 1
            self._advance(here[3])

    def _advance(self, device: int) -> None:
        self.at[device] += 1
        self.is_stuck[device] = False
        self.ready.append(device)

    def _next(self, device: int) -> Stop | None:
        """Where a device comes to next; receives that were taken already are passed."""
        line, at = self.lines[device], self.at[device]
        while at < len(line) and not line[at][1] and line[at][2] in self.taken:
            at += 1
        self.at[device] = at
        return line[at] if at < len(line) else None

    def _cycle(self, device: int) -> list[Stop]:
        """Whom a stuck device waits for, and whom that one, and so on, if they wait for it in the end."""
        path: list[Stop] = []
        other = device
        while self.is_stuck[other] and (stop := self._next(other)) is not None:
            path.append(stop)
            other = stop[3]
            if other == device:
                return path
        return []

    def _release(self, cycle: list[Stop]) -> None:
        """Of the sends in the cycle the oldest is received now, ahead of what its receiver is stuck at."""
        key = min((key for _, is_send, key, _ in cycle if is_send), key=self.made.__getitem__)
        _, source, target = key
        here = self._next(target)
        assert here is not None
        self.moved[target].setdefault(here[0], []).append(self.receives[key])
        self.taken.add(key)
        self._advance(source)

    @cached_property
    def made(self) -> dict[Key, int]:
        return _made(self.program)

    @cached_property
    def receives(self) -> dict[Key, int]:
        return {key: index for line in self.lines for index, is_send, key, _ in line if not is_send}


def _stops(row: Sequence[Instruction], device: int) -> Iterator[Stop]:
    for index, instruction in enumerate(row):
        if (key := _key(instruction, device)) is not None:
            is_send = instruction.op is Op.SEND
            yield index, is_send, key, key[2] if is_send else key[1]


def _early(program: Program, ahead: int) -> list[Moved]:
    made = _made(program)
    return [_advanced(row, d, made, ahead) for d, row in enumerate(program.rows)]


def _advanced(row: Sequence[Instruction], device: int, made: dict[Key, int], ahead: int) -> Moved:
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
