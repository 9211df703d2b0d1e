"""Verifier of messages: every RECV has its SEND, every SEND its RECV, and no device waits forever.

    device 0 │ SEND v#0 to 1 ──────▶ device 1 │ RECV v#0 from 0

The host sends inputs, and gradients of outputs, as often as they are received. The host receives every output, and
every gradient of an input, exactly once. All devices of a tie wait for its exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pipecompile.ir import HOST, UNTRAINED, Instruction, Op, Program, Value, place
from pipecompile.ir.directions import all_placements, placement_of
from pipecompile.verifiers.deadlock import Step, deadlocks
from pipecompile.verifiers.message_models import MessageModel

__all__ = ["pairing_faults", "waiting_rows"]

Message = tuple[Value, int, int]
"""A message: its value, its source and its target; a source or target is a device or HOST."""


def pairing_faults(program: Program, models: frozenset[MessageModel]) -> list[str]:
    """Return all sends and receives without partner, all cycles of waits among devices, all messages out of order."""
    numbers: dict[Message, int] = {}
    lines = [_line(device, row, numbers) for device, row in enumerate(program.rows)]
    sends = Counter(number for line in lines for i, number in line if i.op is Op.SEND)
    recvs = Counter(number for line in lines for i, number in line if i.op is Op.RECV)
    for (value, source, _), number in numbers.items():
        if source == HOST and _host_sends(program, value):
            sends[number] += recvs[number]
    for message in _host_receives(program):
        recvs[numbers.setdefault(message, len(numbers))] += 1
    messages = list(numbers)
    faults = list(_unpaired(messages, sends, recvs))
    if models:
        buffered = _deadlocks(program, lines, meet=False)
        faults += buffered
        if MessageModel.RENDEZVOUS in models and not buffered:
            cycles = _deadlocks(program, lines, meet=True)
            faults += (f"if sends wait for their receives: {cycle}" for cycle in cycles)
    if MessageModel.FIFO in models:
        faults += _out_of_order(lines, messages)
    return faults


Line = list[tuple[Instruction, int]]
"""The exchanges of a device, in order: instructions with the number of their message, -1 for a tied parameter."""


def _line(device: int, row: Sequence[Instruction], numbers: dict[Message, int]) -> Line:
    line: Line = []
    for instruction in row:
        op = instruction.op
        if op is Op.SEND and instruction.peer is not None:
            message = instruction.reads[0].value, device, instruction.peer
            line.append((instruction, numbers.setdefault(message, len(numbers))))
        elif op is Op.RECV and instruction.peer is not None:
            message = instruction.writes[0].value, instruction.peer, device
            line.append((instruction, numbers.setdefault(message, len(numbers))))
        elif op is Op.BROADCAST or op is Op.REDUCE:
            line.append((instruction, -1))
    return line


def _host_sends(program: Program, value: Value) -> bool:
    """Return whether the host sends this value: an input of the model, or the gradient of an output."""
    for route in program.routes:
        if route.value == value.name:
            is_output_grad = HOST in route.consumers and route.gradient and value.consumer == HOST
            return is_output_grad or (route.source == HOST and value.consumer is None)
    return False


def _host_receives(program: Program) -> Iterator[Message]:
    """Yield the messages to the host."""
    trained = any(i.action is not None and i.action.kind not in UNTRAINED for row in program.rows for i in row)
    moved = placement_of(program)
    for route in program.routes:
        for microbatch in range(program.n_microbatches):
            placement = moved.get(microbatch, program.placement)
            if route.source != HOST and HOST in route.consumers:
                yield Value(route.value, microbatch), placement[route.source], HOST
            if route.source == HOST and route.gradient and trained:
                for consumer in (c for c in route.consumers if c != HOST):
                    yield Value(route.value, microbatch, consumer), placement[consumer], HOST


def _unpaired(messages: Sequence[Message], sends: Counter[int], recvs: Counter[int]) -> Iterator[str]:
    for number in dict.fromkeys([*sends, *recvs]):
        sent, received = sends[number], recvs[number]
        if (sent, received) != (1, 1):
            value, source, target = messages[number]
            send_text = f"SEND {value} to {place(target)}" if sent else "(nothing)"
            recv_text = f"RECV {value} from {place(source)}" if received else "(nothing)"
            picture = f"{_end(source)} │ {send_text} ──▶ {recv_text} │ {_end(target)}"
            times = f"{_times('sent', sent)}, {_times('received', received)}"
            yield f"{value} from {_end(source)} to {_end(target)}: {times}\n      {picture}"


def _times(verb: str, count: int) -> str:
    return f"never {verb}" if count == 0 else f"{verb} once" if count == 1 else f"{verb} {count} times"


def _end(end: int) -> str:
    return place(end) if end == HOST else f"device {end}"


def _deadlocks(program: Program, lines: Sequence[Line], *, meet: bool) -> list[str]:
    """Return the cycles of waits. With `meet`, a send waits for its receive as the receive waits for its send."""
    rows, origin = _waits(program, lines, meet=meet)
    return deadlocks(rows, lambda device, step: lines[device][origin[device][step]][0])


def waiting_rows(program: Program, *, meet: bool) -> tuple[list[list[Step]], list[list[int]]]:
    """Return the steps of each row that wait or are awaited, and for each step the number of its exchange in the row."""
    numbers: dict[Message, int] = {}
    return _waits(program, [_line(device, row, numbers) for device, row in enumerate(program.rows)], meet=meet)


def _waits(program: Program, lines: Sequence[Line], *, meet: bool) -> tuple[list[list[Step]], list[list[int]]]:
    parties = {tie.name: tie.devices(*all_placements(program)) for tie in program.ties}
    rows: list[list[Step]] = []
    origin: list[list[int]] = []
    for device, line in enumerate(lines):
        steps: list[Step] = []
        index_of: list[int] = []
        for index, (instruction, number) in enumerate(line):
            before = len(steps)
            if number < 0:
                names = [(str(instruction), party) for party in parties.get(instruction.tie or "", ())]
                steps += [((), (str(instruction), device)), (tuple(names), None)]
            elif instruction.peer != HOST:
                steps += _steps(number, instruction.op is Op.SEND, meet)
            index_of += [index] * (len(steps) - before)
        rows.append(steps)
        origin.append(index_of)
    return rows, origin


def _steps(number: int, is_send: bool, meet: bool) -> list[Step]:
    """Return the steps of a message: n is provided when it is sent, ~n when its receive is posted."""
    if is_send:
        return [((), number), ((~number,), None)] if meet else [((), number)]
    return [((), ~number), ((number,), None)] if meet else [((number,), None)]


def _out_of_order(lines: Sequence[Line], messages: Sequence[Message]) -> Iterator[str]:
    """Yield each pair of devices whose messages are not received in sending order."""
    sent = _by_pair((number for line in lines for i, number in line if i.op is Op.SEND), messages)
    received = _by_pair((number for line in lines for i, number in line if i.op is Op.RECV), messages)
    for pair, sending_order in sent.items():
        receiving_order = received.get(pair, [])
        if sending_order == receiving_order or HOST in pair or Counter(sending_order) != Counter(receiving_order):
            continue
        first = next(index for index, (a, b) in enumerate(zip(sending_order, receiving_order, strict=True)) if a != b)
        (source, target), several = pair, slice(first, first + 3)
        names = [
            ", ".join(str(messages[number][0]) for number in numbers[several])
            for numbers in (sending_order, receiving_order)
        ]
        yield (
            f"messages from device {source} to device {target} are not received in the order in which they are sent\n"
            f"      device {source} │ … SEND {names[0]} … ──▶ device {target} │ … RECV {names[1]} …"
        )


def _by_pair(numbers: Iterable[int], messages: Sequence[Message]) -> dict[tuple[int, int], list[int]]:
    by_pair: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        by_pair.setdefault(messages[number][1:], []).append(number)
    return by_pair
