"""Does every RECV have its SEND, and every SEND its RECV? And can the devices meet them?

    device 0 │ SEND v#0 to 1 ──────▶ device 1 │ RECV v#0 from 0

The host sends the inputs (and the gradients of outputs) whenever asked, and takes every output (and every gradient of
an input) exactly once. Exchanges of tied parameters are waited for by all their devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipecompile.checks.deadlock import Step, deadlocks
from pipecompile.checks.models import Model
from pipecompile.ir import HOST, Instruction, Kind, Op, Program, Value, place

__all__ = ["pairing_faults"]

Message = tuple[Value, int, int]
"""One value on its way from a device, or the host, to another."""


def pairing_faults(program: Program, models: frozenset[Model]) -> list[str]:
    """All sends and receives that lack their partner, all cycles of waits among devices, all messages out of turn."""
    lines = [_Line(device, row) for device, row in enumerate(program.rows)]
    sends = Counter(message for line in lines for message in line.sends)
    recvs = Counter(message for line in lines for message in line.recvs)
    sends.update(message for message in recvs if message[1] == HOST and _host_gives(program, message[0]))
    recvs.update(_host_takes(program))
    faults = list(_unpaired(sends, recvs))
    if models:
        buffered = _deadlocks(program, lines, meet=False)
        faults += buffered
        if Model.RENDEZVOUS in models and not buffered:
            faults += (f"if sends wait for their receives: {cycle}" for cycle in _deadlocks(program, lines, meet=True))
    if Model.FIFO in models:
        faults += _out_of_turn(lines)
    return faults


class _Line:
    """What a device exchanges, in order: instructions with their message, or with none for a tied parameter."""

    def __init__(self, device: int, row: Sequence[Instruction]) -> None:
        self.found: list[tuple[Instruction, Message | None]] = []
        for instruction in row:
            match instruction.op:
                case Op.SEND if instruction.peer is not None:
                    self.found.append((instruction, (instruction.reads[0].value, device, instruction.peer)))
                case Op.RECV if instruction.peer is not None:
                    self.found.append((instruction, (instruction.writes[0].value, instruction.peer, device)))
                case Op.BROADCAST | Op.REDUCE:
                    self.found.append((instruction, None))
        self.sends = [message for i, message in self.found if message and i.op is Op.SEND]
        self.recvs = [message for i, message in self.found if message and i.op is Op.RECV]


def _host_gives(program: Program, value: Value) -> bool:
    """Whether the host can send this: an input of the model, or the gradient of an output."""
    for route in program.routes:
        if route.value == value.name:
            wanted = HOST in route.consumers and route.gradient and value.consumer == HOST
            return wanted or (route.source == HOST and value.consumer is None)
    return False


def _host_takes(program: Program) -> Iterator[Message]:
    """What the host waits for."""
    trained = any(i.action is not None and i.action.kind is not Kind.FORWARD for row in program.rows for i in row)
    for route in program.routes:
        for microbatch in range(program.n_microbatches):
            if route.source != HOST and HOST in route.consumers:
                yield Value(route.value, microbatch), program.placement[route.source], HOST
            if route.source == HOST and route.gradient and trained:
                for consumer in (c for c in route.consumers if c != HOST):
                    yield Value(route.value, microbatch, consumer), program.placement[consumer], HOST


def _unpaired(sends: Counter[Message], recvs: Counter[Message]) -> Iterator[str]:
    if sends == recvs and all(count == 1 for count in sends.values()):
        return
    for message in dict.fromkeys([*sends, *recvs]):
        value, source, target = message
        sent, received = sends[message], recvs[message]
        if (sent, received) != (1, 1):
            given = f"SEND {value} to {place(target)}" if sent else "(nothing)"
            taken = f"RECV {value} from {place(source)}" if received else "(nothing)"
            picture = f"{_end(source)} │ {given} ──▶ {taken} │ {_end(target)}"
            times = f"{_times('sent', sent)}, {_times('received', received)}"
            yield f"{value} from {_end(source)} to {_end(target)}: {times}\n      {picture}"


def _times(verb: str, count: int) -> str:
    return f"never {verb}" if count == 0 else f"{verb} once" if count == 1 else f"{verb} {count} times"


def _end(end: int) -> str:
    return place(end) if end == HOST else f"device {end}"


@dataclass(frozen=True, slots=True)
class _Posted:
    """The receive of a message is posted: what its send waits for when the two must meet."""

    message: Message


def _deadlocks(program: Program, lines: Sequence[_Line], *, meet: bool) -> list[str]:
    """Cycles of waits. `meet`: a send waits for its receive, as the receive for its send."""
    rows: list[list[Step]] = []
    origin: list[list[int]] = []
    parties = {tie.name: tie.devices(program.placement) for tie in program.ties}
    for device, line in enumerate(lines):
        steps: list[Step] = []
        index_of: list[int] = []
        for index, (instruction, message) in enumerate(line.found):
            before = len(steps)
            if message is None:
                names = [(str(instruction), party) for party in parties.get(instruction.tie or "", ())]
                steps += [((), (str(instruction), device)), (tuple(names), None)]
            elif instruction.op is Op.SEND:
                steps.append(((), message))
                if meet and message[2] != HOST:
                    steps.append(((_Posted(message),), None))
            elif message[1] != HOST:
                if meet:
                    steps.append(((), _Posted(message)))
                steps.append(((message,), None))
            index_of += [index] * (len(steps) - before)
        rows.append(steps)
        origin.append(index_of)
    return deadlocks(rows, lambda device, step: lines[device].found[origin[device][step]][0])


def _out_of_turn(lines: Sequence[_Line]) -> Iterator[str]:
    """Pairs of devices where what is received next is not what was sent next."""
    sent = _by_pair(message for line in lines for message in line.sends)
    received = _by_pair(message for line in lines for message in line.recvs)
    for pair, order in sent.items():
        taken = received.get(pair, [])
        if order == taken or HOST in pair or Counter(order) != Counter(taken):
            continue
        first = next(index for index, (a, b) in enumerate(zip(order, taken, strict=True)) if a != b)
        (source, target), several = pair, slice(first, first + 3)
        names = [", ".join(str(value) for value in values[several]) for values in (order, taken)]
        yield (
            f"messages from device {source} to device {target} are not received in the order in which they are sent\n"
            f"      device {source} │ … SEND {names[0]} … ──▶ device {target} │ … RECV {names[1]} …"
        )


def _by_pair(messages: Iterator[Message]) -> dict[tuple[int, int], list[Value]]:
    found: dict[tuple[int, int], list[Value]] = {}
    for value, source, target in messages:
        found.setdefault((source, target), []).append(value)
    return found
