"""From a program to code: every instruction becomes one Python function of the frame, with all names resolved.

    RECV relu#3[1] from 0     ──►   registers[17] = boxes[42]
    1F3 relu#3[1] -> ...      ──►   the cell's forward on registers 17 ...
    FREE relu#3[1]            ──►   registers[17] = None

An operand's register is its (device, name, consumer, slot). A box is one SEND with its RECV. The same code runs inline,
where a box is a list entry, and in threads, where it is a queue of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from pipecompile.ir import HOST, Action, Instruction, Kind, Op, Operand, Program, Value, recipe, saved, weight_saved
from pipecompile.runtime.cells.forward_backward import Run, backward_cell, forward_cell, input_cell, weight_cell
from pipecompile.runtime.cells.recompute import Footprints, Stint, checkpointed_cell, drawing_alone, recompute_cell
from pipecompile.runtime.cells.split_backward import DividedBackward
from pipecompile.runtime.host import arrive, depart, depart_gradient
from pipecompile.runtime.linear_order import joins_halves, merged, with_frees
from pipecompile.runtime.ports import Ports
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.stream_events import launches
from pipecompile.runtime.streams import Act, DeviceStreams, Streams, launched
from pipecompile.runtime.transport import Link

__all__ = ["Binder", "Cell", "Code", "bind"]

Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a stage computes in one program: `function(*inputs, [size])` gives the tuple of `outputs`; `prints` says what
    running it leaves behind, and `look()` comes before a run of the program. With `slots`, micro-batches in a slot have a
    function of their own, and those of which nothing is kept the one for None.
    """

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sized: bool
    prints: Footprints
    look: Callable[[], None]
    weights: frozenset[int]
    slots: Callable[[int | None], Function] | None = None

    def at(self, slot: int | None) -> Function:
        return self.function if self.slots is None else self.slots(slot)


@dataclass(frozen=True, slots=True)
class Code:
    """`rows[d][i]` runs instruction i of device d. `flat` are functions that run them all in one thread, in a legal order, and
    `order` says which instruction each begins with: a FREE runs together with what comes before it on its device.
    """

    program: Program
    rows: tuple[tuple[Run, ...], ...]
    order: tuple[tuple[int, int], ...]
    flat: tuple[Run, ...]
    n_registers: int
    n_boxes: int
    threaded: bool


def bind(
    program: Program,
    cells: Sequence[Cell],
    devices: Sequence[torch.device],
    *,
    threaded: bool,
    streams: Streams | None = None,
) -> Code:
    """Resolve a program for `devices` (one per pipeline device) and their streams. Linear in its instructions."""
    beside = DeviceStreams(devices)
    is_alone = not threaded and streams is None and all(device.type == "cpu" for device in devices)
    joins = is_alone and joins_halves(program, [cell.weights for cell in cells])
    binder = Binder(program, cells, devices, streams or beside, threaded, joins=joins)
    rows = tuple(tuple(binder.run(instruction, d) for instruction in row) for d, row in enumerate(program.rows))
    if is_apart := streams is not None or beside.overlap:
        rows = binder.launched(rows)
    walk = merged(program)
    freed = dict.fromkeys(walk, ()) if is_apart else with_frees(program, walk)
    flat = tuple(_then_free(rows[d][i], [binder.register(o, d) for o in frees]) for (d, i), frees in freed.items())
    return Code(program, rows, tuple(freed), flat, len(binder.registers), len(binder.boxes), threaded)


class Binder:
    """`joins`: I does all of a backward, and W nothing."""

    def __init__(
        self,
        program: Program,
        cells: Sequence[Cell],
        devices: Sequence[torch.device],
        streams: Streams,
        threaded: bool,
        *,
        joins: bool = False,
    ) -> None:
        self.program, self.cells, self.devices, self.threaded = program, cells, devices, threaded
        self.streams, self.joins = streams, joins
        self.registers: dict[tuple[int, str, int | None, int | None], int] = {}
        self.boxes: dict[tuple[Value, int, int], int] = {}
        self.links: dict[tuple[int, int], Link] = {}
        self.divisions: dict[int, DividedBackward] = {}
        actions = (instruction.action for row in program.rows for instruction in row)
        self.recomputes = any(action is not None and action.kind is Kind.RECOMPUTE for action in actions)

    def register(self, operand: Operand, device: int) -> int:
        key = (device, operand.value.name, operand.value.consumer, operand.slot)
        return self.registers.setdefault(key, len(self.registers))

    def run(self, instruction: Instruction, device: int) -> Run:
        match instruction.op:
            case Op.COMPUTE:
                return self.compute(instruction, device)
            case Op.SEND:
                return self.send(instruction, device)
            case Op.RECV:
                return self.receive(instruction, device)
            case Op.FREE:
                return _then_free(_nothing, [self.register(instruction.reads[0], device)])
            case Op.BROADCAST | Op.REDUCE:
                raise AssertionError("within one process, mirrors refresh and sum tied parameters")

    def launched(self, rows: Sequence[Sequence[Run]]) -> tuple[tuple[Run, ...], ...]:
        """Every instruction on its stream, after the events that it waits for."""
        return tuple(
            tuple(
                launched(self.act(run, d, i), launch, self.streams.stream(launch.lane))
                for i, (run, launch) in enumerate(zip(row, found, strict=True))
            )
            for d, (row, found) in enumerate(zip(rows, launches(self.program, self.streams.apart), strict=True))
        )

    def act(self, run: Run, device: int, index: int) -> Act:
        instruction = self.program.rows[device][index]
        reads, writes = (
            tuple(self.register(operand, device) for operand in side)
            for side in (instruction.reads, instruction.writes)
        )
        return Act((device, index), instruction.op, run, reads, writes)

    # -- compute --------------------------------------------------------------------------------------------------

    def compute(self, instruction: Instruction, device: int) -> Run:
        action = instruction.action
        assert action is not None
        run = _timed(self.action(instruction, action, device), device, str(action))
        return _on_gpu(run, self.devices[device]) if self.devices[device].type == "cuda" else run

    def action(self, instruction: Instruction, action: Action, device: int) -> Run:
        s, m, place = action.stage, action.microbatch, self.devices[device]
        cell, ports = self.cells[s], Ports(instruction, partial(self.register, device=device))
        kept, left, way = saved(s, m).name, weight_saved(s, m).name, recipe(s, m).name
        slot = next((operand.slot for operand in instruction.writes if operand.value == saved(s, m)), None)
        ran = Stint(cell.at(slot), m if cell.sized else None, cell.prints, place)
        inputs = [ports.reads[name] for name in cell.inputs if action.kind in (Kind.FORWARD, Kind.RECOMPUTE)]
        outputs = [ports.writes[name] for name in cell.outputs if action.kind is Kind.FORWARD]
        gradients, sent = ports.gradients(cell.outputs), ports.sent(cell.inputs)
        match action.kind:
            case Kind.FORWARD if way in ports.writes:
                return checkpointed_cell(ran, inputs, outputs, ports.writes[way])
            case Kind.FORWARD:
                kept_in, casts = ports.writes.get(kept), cell.prints.casts
                run = forward_cell(ran.stage, inputs, outputs, kept_in, ran.size_of, casts=casts)
                return drawing_alone(run) if cell.prints.draws and self.recomputes and place.type == "cpu" else run
            case Kind.RECOMPUTE:
                return recompute_cell(ran, inputs, ports.reads[way], ports.writes[kept])
            case Kind.BACKWARD:
                return backward_cell(ports.reads[kept], gradients, sent)
            case Kind.INPUT_GRAD if self.joins:
                return backward_cell(ports.reads[kept], gradients, sent)
            case Kind.WEIGHT_GRAD if self.joins:
                return _nothing
            case Kind.INPUT_GRAD:
                return input_cell(ports.reads[kept], gradients, sent, ports.writes[left], self.divided(s, place))
            case Kind.WEIGHT_GRAD:
                return weight_cell(ports.reads[left], self.divided(s, place))

    def divided(self, stage: int, device: torch.device) -> DividedBackward:
        return self.divisions.setdefault(stage, DividedBackward(device.type))

    # -- transfers ------------------------------------------------------------------------------------------------

    def send(self, instruction: Instruction, device: int) -> Run:
        (operand,), peer = instruction.reads, instruction.peer
        index, value = self.register(operand, device), operand.value
        if peer == HOST:
            if value.consumer is not None:
                return depart_gradient((value.name, True), value.microbatch, index, value.consumer)
            return depart((value.name, False), value.microbatch, index)
        assert peer is not None
        return self.put(index, self.box(value, device, peer), self.between(device, peer))

    def receive(self, instruction: Instruction, device: int) -> Run:
        (operand,), peer = instruction.writes, instruction.peer
        index, value = self.register(operand, device), operand.value
        if peer == HOST:
            return arrive((value.name, value.consumer is not None), value.microbatch, index, self.devices[device])
        assert peer is not None
        return self.take(index, self.box(value, peer, device), self.between(peer, device))

    def box(self, value: Value, source: int, target: int) -> int:
        return self.boxes.setdefault((value, source, target), len(self.boxes))

    def between(self, source: int, target: int) -> Link:
        if (source, target) not in self.links:
            self.links[source, target] = self.streams.link(source, target)
        return self.links[source, target]

    def put(self, index: int, box: int, way: Link) -> Run:
        send = None if type(way) is Link else way.send

        def inline(frame: Frame) -> None:
            value = frame.registers[index]
            frame.boxes[box] = value if send is None else send(value)

        def threaded(frame: Frame) -> None:
            value = frame.registers[index]
            frame.boxes[box].put(value if send is None else send(value))

        return threaded if self.threaded else inline

    def take(self, index: int, box: int, way: Link) -> Run:
        receive = None if type(way) is Link else way.receive

        def inline(frame: Frame) -> None:
            parcel, frame.boxes[box] = frame.boxes[box], None
            frame.registers[index] = parcel if receive is None else receive(parcel)

        def threaded(frame: Frame) -> None:
            parcel = frame.boxes[box].get()
            if parcel is ABORT:
                raise Aborted
            frame.registers[index] = parcel if receive is None else receive(parcel)

        return threaded if self.threaded else inline


class Aborted(Exception):
    """Another device failed; this one stops."""


ABORT = object()
"""What a failing device puts into every box."""


def _nothing(_frame: Frame) -> None:
    """Of a W whose work I did; of a FREE before it frees."""


def _then_free(run: Run, indices: Sequence[int]) -> Run:
    def run_and_free(frame: Frame) -> None:
        run(frame)
        for index in indices:
            frame.registers[index] = None

    return run_and_free if indices else run


def _timed(run: Run, device: int, name: str) -> Run:
    def timed(frame: Frame) -> None:
        start = perf_counter()
        run(frame)
        frame.spans.append((device, name, start, perf_counter()))

    return timed


def _on_gpu(run: Run, device: torch.device) -> Run:
    def on_gpu(frame: Frame) -> None:
        with torch.cuda.device(device):
            run(frame)

    return on_gpu
