"""Does every RECV have its SEND, and every SEND its RECV? And can the devices meet them?

    device 0 │ SEND v#0 to 1 ──────▶ device 1 │ RECV v#0 from 0

The host sends the inputs (and the gradients of outputs) whenever asked, and takes every output (and every gradient of
an input) exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pipecompile.checks.deadlock import Wait, deadlocks
from pipecompile.ir import HOST, Kind, Op, Program, Value, place

__all__ = ["pairing_faults"]


@dataclass(frozen=True, slots=True)
class _Message:
    """One value on its way."""

    value: Value
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.value} from {_end(self.source)} to {_end(self.target)}"


def pairing_faults(program: Program) -> list[str]:
    """All sends and receives that lack their partner, and all cycles of waits among devices."""
    sends: Counter[_Message] = Counter()
    recvs: Counter[_Message] = Counter()
    rows = []
    for device, row in enumerate(program.rows):
        steps = []
        for instruction in row:
            if instruction.op is Op.SEND and instruction.peer is not None:
                message = _Message(instruction.reads[0].value, device, instruction.peer)
                sends[message] += 1
                steps.append(Wait(instruction, gives=message))
            elif instruction.op is Op.RECV and instruction.peer is not None:
                message = _Message(instruction.writes[0].value, instruction.peer, device)
                recvs[message] += 1
                steps.append(Wait(instruction, needs=(message,)))
        rows.append(steps)
    sends.update(message for message in recvs if message.source == HOST and _host_gives(program, message.value))
    recvs.update(_host_takes(program))
    return [*_unpaired(sends, recvs), *deadlocks(rows)]


def _host_gives(program: Program, value: Value) -> bool:
    """Whether the host can send this: an input of the model, or the gradient of an output."""
    for route in program.routes:
        if route.value == value.name:
            wanted = HOST in route.consumers and route.gradient and value.consumer == HOST
            return wanted or (route.source == HOST and value.consumer is None)
    return False


def _host_takes(program: Program) -> Iterator[_Message]:
    """What the host waits for."""
    trained = any(i.action is not None and i.action.kind is not Kind.FORWARD for row in program.rows for i in row)
    for route in program.routes:
        for microbatch in range(program.n_microbatches):
            if route.source != HOST and HOST in route.consumers:
                yield _Message(Value(route.value, microbatch), program.placement[route.source], HOST)
            if route.source == HOST and route.gradient and trained:
                for consumer in (c for c in route.consumers if c != HOST):
                    yield _Message(Value(route.value, microbatch, consumer), program.placement[consumer], HOST)


def _unpaired(sends: Counter[_Message], recvs: Counter[_Message]) -> Iterator[str]:
    for message in dict.fromkeys([*sends, *recvs]):
        sent, received = sends[message], recvs[message]
        if (sent, received) != (1, 1):
            given = f"SEND {message.value} to {place(message.target)}" if sent else "(nothing)"
            taken = f"RECV {message.value} from {place(message.source)}" if received else "(nothing)"
            picture = f"{_end(message.source)} │ {given} ──▶ {taken} │ {_end(message.target)}"
            yield f"{message}: {_times('sent', sent)}, {_times('received', received)}\n      {picture}"


def _times(verb: str, count: int) -> str:
    return f"never {verb}" if count == 0 else f"{verb} once" if count == 1 else f"{verb} {count} times"


def _end(end: int) -> str:
    return place(end) if end == HOST else f"device {end}"
