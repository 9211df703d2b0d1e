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
from time import perf_counter
from typing import Any

import torch

from pipecompile.ir import HOST, Instruction, Kind, Op, Operand, Program, Value
from pipecompile.runtime.cells import Run, backward_cell, forward_cell
from pipecompile.runtime.frame import Frame
from pipecompile.runtime.transport import Link, link, to_device

__all__ = ["Cell", "Code", "bind"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a stage computes in one program: `function(*inputs, [size])` gives the tuple of `outputs`."""

    function: Callable[..., Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sized: bool


@dataclass(frozen=True, slots=True)
class Code:
    """`rows[d][i]` runs instruction i of device d; `order` is a legal order of all of them for one thread, `flat` the
    same as functions.
    """

    program: Program
    rows: tuple[tuple[Run, ...], ...]
    order: tuple[tuple[int, int], ...]
    flat: tuple[Run, ...]
    n_registers: int
    n_boxes: int
    threaded: bool


def bind(program: Program, cells: Sequence[Cell], devices: Sequence[torch.device], *, threaded: bool) -> Code:
    """Resolve a program for `devices` (one per pipeline device). Linear in its instructions."""
    binder = _Binder(program, cells, devices, threaded)
    rows = tuple(tuple(binder.run(instruction, d) for instruction in row) for d, row in enumerate(program.rows))
    order = merged(program)
    flat = tuple(rows[d][i] for d, i in order)
    return Code(program, rows, order, flat, len(binder.registers), len(binder.boxes), threaded)


def merged(program: Program) -> tuple[tuple[int, int], ...]:
    """Instructions of all devices in one order in which every RECV comes after its SEND.

    The last device that can go on always does, so a value is used as soon as it is made, while it is in the cache.
    """
    order: list[tuple[int, int]] = []
    at = [0] * program.n_devices
    sent: set[tuple[Value, int | None, int]] = set()
    run: set[tuple[int, int]] = set()
    while len(order) < sum(map(len, program.rows)):
        device = _last_ready(program, at, sent, run)
        instruction = program.rows[device][at[device]]
        if instruction.op is Op.SEND:
            sent.add((instruction.reads[0].value, instruction.peer, device))
        elif instruction.action is not None and instruction.action.kind is Kind.FORWARD:
            run.add((instruction.action.stage, instruction.action.microbatch))
        order.append((device, at[device]))
        at[device] += 1
    return tuple(order)


def _last_ready(
    program: Program, at: Sequence[int], sent: set[tuple[Value, int | None, int]], run: set[tuple[int, int]]
) -> int:
    for device in reversed(range(program.n_devices)):
        row = program.rows[device]
        if at[device] < len(row) and _ready(row[at[device]], device, sent, run):
            return device
    raise AssertionError("a verified program cannot deadlock")


def _ready(
    instruction: Instruction, device: int, sent: set[tuple[Value, int | None, int]], run: set[tuple[int, int]]
) -> bool:
    """Stages run forward in their order even where no value makes them: then random numbers are drawn as in the model."""
    action = instruction.action
    if action is not None and action.kind is Kind.FORWARD and action.stage:
        return (action.stage - 1, action.microbatch) in run
    if instruction.op is not Op.RECV or instruction.peer == HOST:
        return True
    return (instruction.writes[0].value, device, instruction.peer) in sent


class _Binder:
    def __init__(
        self, program: Program, cells: Sequence[Cell], devices: Sequence[torch.device], threaded: bool
    ) -> None:
        self.program, self.cells, self.devices, self.threaded = program, cells, devices, threaded
        self.registers: dict[tuple[int, str, int | None, int | None], int] = {}
        self.boxes: dict[tuple[Value, int, int], int] = {}
        self.links: dict[tuple[torch.device, torch.device], Link] = {}

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
                index = self.register(instruction.reads[0], device)
                return _free(index)
            case Op.BROADCAST | Op.REDUCE:
                raise AssertionError("within one process, mirrors refresh and sum tied parameters")

    # -- compute --------------------------------------------------------------------------------------------------

    def compute(self, instruction: Instruction, device: int) -> Run:
        action = instruction.action
        assert action is not None
        cell = self.cells[action.stage]
        kind = self.forward if action.kind is Kind.FORWARD else self.backward
        run = _timed(kind(instruction, device, cell), device, str(action))
        return _on_gpu(run, self.devices[device]) if self.devices[device].type == "cuda" else run

    def forward(self, instruction: Instruction, device: int, cell: Cell) -> Run:
        reads = {operand.value.name: self.register(operand, device) for operand in instruction.reads}
        writes = {operand.value.name: self.register(operand, device) for operand in instruction.writes}
        assert instruction.action is not None
        saved = writes.get(f"@{instruction.action.stage}")
        size_of = instruction.action.microbatch if cell.sized else None
        return forward_cell(
            cell.function, [reads[n] for n in cell.inputs], [writes[n] for n in cell.outputs], saved, size_of
        )

    def backward(self, instruction: Instruction, device: int, cell: Cell) -> Run:
        kept, *gradients = instruction.reads
        by_output: dict[str, list[tuple[float, int]]] = {}
        for operand in gradients:
            rank = float("inf") if operand.value.consumer == HOST else float(operand.value.consumer or 0)
            by_output.setdefault(operand.value.name, []).append((rank, self.register(operand, device)))
        pairs = [
            (cell.outputs.index(n), [index for _, index in sorted(found, reverse=True)])
            for n, found in by_output.items()
        ]
        sent = [
            (self.register(operand, device), cell.inputs.index(operand.value.name)) for operand in instruction.writes
        ]
        return backward_cell(self.register(kept, device), pairs, sent)

    # -- transfers ------------------------------------------------------------------------------------------------

    def send(self, instruction: Instruction, device: int) -> Run:
        (operand,), peer = instruction.reads, instruction.peer
        index, value = self.register(operand, device), operand.value
        if peer == HOST:
            if value.consumer is not None:
                return _depart_gradient((value.name, True), value.microbatch, index, value.consumer)
            return _depart((value.name, False), value.microbatch, index)
        assert peer is not None
        return self.put(index, self.box(value, device, peer), self.between(device, peer))

    def receive(self, instruction: Instruction, device: int) -> Run:
        (operand,), peer = instruction.writes, instruction.peer
        index, value = self.register(operand, device), operand.value
        if peer == HOST:
            return _arrive((value.name, value.consumer is not None), value.microbatch, index, self.devices[device])
        assert peer is not None
        return self.take(index, self.box(value, peer, device), self.between(peer, device))

    def box(self, value: Value, source: int, target: int) -> int:
        return self.boxes.setdefault((value, source, target), len(self.boxes))

    def between(self, source: int, target: int) -> Link:
        pair = self.devices[source], self.devices[target]
        if pair not in self.links:
            self.links[pair] = link(*pair)
        return self.links[pair]

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


def _free(index: int) -> Run:
    def free(frame: Frame) -> None:
        frame.registers[index] = None

    return free


def _arrive(key: tuple[str, bool], microbatch: int, index: int, device: torch.device) -> Run:
    def arrive(frame: Frame) -> None:
        frame.registers[index] = to_device(frame.arrivals[key][microbatch], device)

    return arrive


def _depart_gradient(key: tuple[str, bool], microbatch: int, index: int, consumer: int) -> Run:
    """The gradients of an input come from every stage that uses it, from several threads perhaps."""

    def depart(frame: Frame) -> None:
        frame.departures[key][microbatch][consumer] = frame.registers[index]

    return depart


def _depart(key: tuple[str, bool], microbatch: int, index: int) -> Run:
    def depart(frame: Frame) -> None:
        value = frame.registers[index]
        if isinstance(value, torch.Tensor):  # alone, but it still says whether a gradient was wanted
            value = value.detach().requires_grad_(value.requires_grad)
        frame.departures[key][microbatch] = value

    return depart


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
