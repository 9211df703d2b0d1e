"""Plan of streams, events and receive buffers: on which stream each instruction runs, what it waits for, and where a copy goes.

    device 0, compute     0F0 ■──────────┐  0F1               ┌─ FREE v#0: memory returned to compute, after the copy
    copies from 0 to 1        └─► SEND v#0 ■──────────────────┘              SEND v#2 into the same buffer: after 1B0 ■
    device 1, compute              RECV v#0  └─► 1F0 ...  1B0 ■  FREE v#0            (■ of the last launch that may read v#0)

A stream runs its launches in order, so a wait for a launch includes the launches before it. ■ is an event, recorded after a
launch that others wait for. Launches wait only for events of launches before them, so the host never waits. RECV and FREE of
a received value launch nothing: its readers wait for the copy, and the next copy into its buffer waits for its readers.

    device 0, compute     0F0 ■                 0F1 ■  FREE @0.o#0: waits for the copy    0B1 ■          0B0
    to the store              └─► 0OFFLOAD0 ■──────────┘                                     │            │
    from the store                          └────────────────────────────────────────────────┴─► 0RELOAD0 ■

What RELOAD writes is memory of compute: so the copy begins after all that compute has launched before.

On ranks each host launches the row of its device alone, so a value that crosses is launched twice, as a message without a buffer
on the sender and as a copy from the peer on the receiver. All events are of the own row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from pipecompile.ir import HOST, Instruction, Kind, Op, Program, Value
from pipecompile.ir.execution_order import Place, merged

__all__ = ["STORE", "Lane", "Launch", "Place", "launches", "row_launches"]

Lane = tuple[int, int]
"""A stream: (d, d) computes on device d, (d, e) copies from device d to device e, (HOST, d) copies from the host to device d,
(d, STORE) copies what forwards saved to the host, and (STORE, d) copies it back.
On ranks (d, e) is a stream on both devices: the messages that d sends, and those that e receives."""

STORE = -2
"""The memory of the host for what forwards saved: its copies wait for other things than those of inputs, so they have lanes of
their own.
"""

SPARE_BUFFERS = 2
"""Receive buffers of a value beyond those that hold one when a copy is launched. Without a spare one, a copy waits for the
reader of the value before it (benchmarks/launches.py)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of one instruction on `lane`, after the launches `waits`; None for an instruction that launches nothing.

    `is_awaited`: another launch waits for this one. `buffer` is the receive buffer that a copy writes, or that RECV takes its value
    from; of an OFFLOAD, the buffer of the host. `follows` are launches of other devices that the host must have launched before.
    """

    lane: Lane | None
    waits: tuple[Place, ...] = ()
    is_awaited: bool = False
    buffer: int | None = None
    follows: tuple[Place, ...] = ()


def launches(program: Program, apart: Callable[[int, int], bool]) -> tuple[tuple[Launch, ...], ...]:
    """Return a launch per instruction. `apart(d, e)`: copies from d, or from HOST, to e have a stream of their own. Linear in
    the instructions.
    """
    plan = _LaunchPlan(program, apart)
    planned = [_RowPlan(plan, device).run() for device in range(program.n_devices)]
    awaited = {place for row in planned for launch in row for place in launch.waits}
    return tuple(_with_events(row, device, awaited) for device, row in enumerate(planned))


def row_launches(program: Program, device: int, apart: Callable[[int, int], bool]) -> tuple[Launch, ...]:
    """Return a launch per instruction of one device's row, for a host that launches this row alone. Linear in the instructions."""
    row = _RowPlan(_LaunchPlan(program, apart, rank=device), device).run()
    return _with_events(row, device, {place for launch in row for place in launch.waits})


def _with_events(row: list[Launch], device: int, awaited: set[Place]) -> tuple[Launch, ...]:
    return tuple(replace(each, is_awaited=True) if (device, i) in awaited else each for i, each in enumerate(row))


@dataclass(slots=True)
class _Copy:
    """A value on its way to device `target`: the launch of its copy, its buffer, and what the copy waits for to write there."""

    place: Place
    target: int
    buffer: int
    reuse: Place | None


class _LaunchPlan:
    """Plans launches device by device. `copies` maps (value, receiver) to the copy that brings it, if it has a stream of its own.

    `rank` is the only device whose row this host launches; None if the host launches all rows.
    """

    def __init__(self, program: Program, apart: Callable[[int, int], bool], rank: int | None = None) -> None:
        self.program, self.apart, self.rank = program, apart, rank
        order = merged(program) if rank is None else tuple((rank, i) for i in range(len(program.rows[rank])))
        self.copies = _assigned(self, order)

    def copied_to(self, device: int, instruction: Instruction) -> int | None:
        """Return the device to which an instruction copies a value on a stream of its own, or None."""
        peer = instruction.peer
        if self.is_stored(device, instruction):
            return STORE
        if peer is None or (peer != HOST and (instruction.op is Op.SEND) is not (self.rank is None)):
            return None
        if instruction.op is Op.SEND:
            return peer if peer != HOST and self.apart(device, peer) else None
        return device if self.apart(peer, device) else None

    def is_stored(self, device: int, instruction: Instruction) -> bool:
        """Return whether an instruction is an OFFLOAD that runs beside compute."""
        return _is_copy(instruction, Kind.OFFLOAD) and self.apart(HOST, device)

    def is_restored(self, device: int, instruction: Instruction) -> bool:
        """Return whether an instruction is a RELOAD that runs beside compute."""
        return _is_copy(instruction, Kind.RELOAD) and self.apart(HOST, device)

    def is_message(self, instruction: Instruction) -> bool:
        """Return whether an instruction sends a value to another rank."""
        return self.rank is not None and instruction.op is Op.SEND and instruction.peer != HOST


def _is_copy(instruction: Instruction, kind: Kind) -> bool:
    return instruction.action is not None and instruction.action.kind is kind


def _assigned(plan: _LaunchPlan, order: Sequence[Place]) -> dict[tuple[Value, int], _Copy]:
    """Return the copies with their buffers, in the order in which one thread launches: the buffer that was freed first is next."""
    copies: dict[tuple[Value, int], _Copy] = {}
    free: dict[tuple[int, str, int | None], deque[tuple[int, Place]]] = {}
    latest: dict[int | Value, Place] = {}
    count = 0
    for d, i in order:
        instruction = plan.program.rows[d][i]
        if plan.is_restored(d, instruction):
            latest[instruction.reads[0].value] = d, i
        elif (target := plan.copied_to(d, instruction)) is not None:
            value = _copied_value(instruction)
            pool = free.setdefault((d if target == STORE else target, value.name, value.consumer), deque())
            buffer, reuse = pool.popleft() if len(pool) > SPARE_BUFFERS else (count, None)
            count += reuse is None
            copies[value, target] = _Copy((d, i), target, buffer, reuse)
        elif instruction.op is Op.COMPUTE:
            latest[d] = d, i
        elif instruction.op is Op.FREE:
            value = instruction.reads[0].value
            copy, reader = copies.get((value, d)), latest.get(d)
            if copy is None:
                copy, reader = copies.get((value, STORE)), latest.get(value)
            if copy is not None:
                free[d, value.name, value.consumer].append((copy.buffer, reader or copy.place))
    return copies


def _copied_value(instruction: Instruction) -> Value:
    """Return the value that an instruction copies: of an OFFLOAD, what the host holds then."""
    operands = instruction.writes if instruction.action is not None else (*instruction.reads, *instruction.writes)
    return operands[0].value


@dataclass(slots=True)
class _RowPlan:
    """The plan of one device's row.

    computed    value ──► launch that computed it
    arriving    received value ──► launch of its copy, until a launch has waited for the copy
    sent        value ──► launches that copy it, after which its memory may be returned
    known       (waiting lane, device, awaited lane) ──► the largest index that the lane has waited for
    """

    plan: _LaunchPlan
    device: int
    planned: list[Launch] = field(default_factory=list)
    computed: dict[Value, Place] = field(default_factory=dict)
    arriving: dict[Value, Place] = field(default_factory=dict)
    sent: dict[Value, list[Place]] = field(default_factory=dict)
    known: dict[tuple[Lane, int, Lane], int] = field(default_factory=dict)

    def run(self) -> list[Launch]:
        for index, instruction in enumerate(self.plan.program.rows[self.device]):
            self.planned.append(self.launch((self.device, index), instruction))
        return self.planned

    def launch(self, place: Place, instruction: Instruction) -> Launch:
        d, copies = self.device, self.plan.copies
        target = self.plan.copied_to(d, instruction)
        if self.plan.is_message(instruction):
            return self.message(instruction, place)
        if target is not None:
            return self.copy(instruction, copies[_copied_value(instruction), target])
        if self.plan.is_restored(d, instruction):
            return self.restore(instruction, place)
        value = (*instruction.writes, *instruction.reads)[0].value if instruction.op is not Op.COMPUTE else None
        if instruction.op is Op.FREE and (value, STORE) in copies:
            return Launch(None)
        if value is not None and instruction.op in (Op.RECV, Op.FREE) and (copy := copies.get((value, d))) is not None:
            if instruction.op is Op.FREE:
                return Launch(None)
            self.arriving[value] = copy.place
            return Launch(None, buffer=copy.buffer, follows=(copy.place,))
        waits = self.sent.pop(value, []) if value is not None and instruction.op is Op.FREE else []
        waits = [*waits, *(self.arriving.pop(o.value) for o in instruction.reads if o.value in self.arriving)]
        self.computed |= dict.fromkeys((operand.value for operand in instruction.writes), place)
        return Launch((d, d), tuple(self.new_waits((d, d), waits)))

    def copy(self, instruction: Instruction, copy: _Copy) -> Launch:
        """Return the launch of a copy, after the launch that computed the value and the last reader of the buffer."""
        d = self.device
        waits = [] if copy.reuse is None else [copy.reuse]
        follows = tuple(place for place in waits if place[0] != d)
        if instruction.op is Op.RECV:
            self.arriving[instruction.writes[0].value] = copy.place
            assert instruction.peer is not None
            lane: Lane = instruction.peer, d
        else:
            value, lane = instruction.reads[0].value, (d, copy.target)
            source = self.computed.get(value) or self.arriving.get(value)
            waits += [source] if source is not None else []
            self.sent.setdefault(value, []).append(copy.place)
        return Launch(lane, tuple(self.new_waits(lane, waits)), buffer=copy.buffer, follows=follows)

    def restore(self, instruction: Instruction, place: Place) -> Launch:
        """Return the launch of a RELOAD, after the copy to the host and after all launches of compute so far: its memory is theirs."""
        d, lane = self.device, (STORE, self.device)
        self.arriving[instruction.writes[0].value] = place
        waits = [self.plan.copies[instruction.reads[0].value, STORE].place]
        before = (i for i in reversed(range(place[1])) if self.planned[i].lane == (d, d))
        waits += [(d, i) for i in islice(before, 1)]
        return Launch(lane, tuple(self.new_waits(lane, waits)))

    def message(self, instruction: Instruction, place: Place) -> Launch:
        """Return the launch of a message to another rank, after the launch that computed the value."""
        value, peer = instruction.reads[0].value, instruction.peer
        assert peer is not None
        self.sent.setdefault(value, []).append(place)
        return Launch((self.device, peer), tuple(self.new_waits((self.device, peer), [self.computed[value]])))

    def new_waits(self, lane: Lane, waits: list[Place]) -> Iterator[Place]:
        """Yield the waits that do not follow from earlier waits of the same stream."""
        for device, index in waits:
            awaited = self.lane_of(device, index)
            if index > self.known.get((lane, device, awaited), -1):
                self.known[lane, device, awaited] = index
                yield device, index

    def lane_of(self, device: int, index: int) -> Lane:
        """Return the lane of a launch that was planned before, or in another row: a copy to this device, or compute."""
        if device == self.device:
            lane = self.planned[index].lane
            assert lane is not None
            return lane
        is_copy = self.plan.program.rows[device][index].op is Op.SEND
        return (device, self.device) if is_copy else (device, device)
