"""From a program to code: each instruction becomes one Python function of the frame, with all names resolved.

    RECV relu#3[1] from 0     ──►   registers[17] = channels[42]
    1F3 relu#3[1] -> ...      ──►   the cell's forward on registers 17 ...
    FREE relu#3[1]            ──►   registers[17] = None

An operand's register is its (device, name, consumer, slot). A channel is one SEND with its RECV. The same code runs inline,
where a channel is a list entry, and in threads, where a channel is a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipecompile.ir import HOST, SHARDING, Action, Instruction, Kind, Op, Operand, Program, Value
from pipecompile.ir.execution_order import frees_after, in_turn, may_join_backward, merged
from pipecompile.ir.program import keys_values, offloaded, recipe, saved, weight_saved
from pipecompile.ir.slices import in_slices
from pipecompile.runtime import transport
from pipecompile.runtime.cells.backward_reads import BackwardReads
from pipecompile.runtime.cells.call_memos import CallMemos
from pipecompile.runtime.cells.divided_backward import DividedBackward
from pipecompile.runtime.cells.forward_backward import backward_cell, forward_cell, input_cell, then_add, weight_cell
from pipecompile.runtime.cells.left_tensors import LeftTensors
from pipecompile.runtime.cells.recompute import StageRun, checkpointed_cell, kept_apart, recompute_cell
from pipecompile.runtime.cells.sliced import SliceRun, slice_run, sliced_backward, sliced_forward
from pipecompile.runtime.cells.stage_cells import Cell, unshared_places
from pipecompile.runtime.cells.state_turns import StageLocks, StateTurns
from pipecompile.runtime.cells.variant_cells import VariantCell, chosen_run
from pipecompile.runtime.gpu_spans import timed_cell
from pipecompile.runtime.received_memory import free_received
from pipecompile.runtime.registers import CellRegisters, Frame, Run
from pipecompile.runtime.stream_events import STORE, Launch, Place, launches
from pipecompile.runtime.streams import DeviceStreams, Streams, StreamTask, launched
from pipecompile.runtime.transport import Link, copy_into, take_from, then_free, upload_into
from pipecompile.tracing.state.change_log import ChangeLog

__all__ = ["Code", "CodeBuilder", "bind"]


@dataclass(frozen=True, slots=True)
class Code:
    """A program as Python functions of a frame.

    `rows[d][i]` runs instruction i of device d. `flat` are functions that run all instructions in one thread, in a legal order;
    `order` names the (device, index in its row) that each of them begins with, since a FREE runs together with the
    instruction before it on its device. `streams` are those on which it launches; None on CPUs.
    """

    program: Program
    rows: tuple[tuple[Run, ...], ...]
    order: tuple[tuple[int, int], ...]
    flat: tuple[Run, ...]
    n_registers: int
    n_channels: int
    threaded: bool
    streams: Streams | None = None


def bind(
    program: Program,
    cells: Sequence[Cell | VariantCell],
    devices: Sequence[torch.device],
    *,
    threaded: bool,
    streams: Streams | None = None,
    build: Callable[..., CodeBuilder] | None = None,
) -> Code:
    """Resolve a program for `devices`, one per pipeline device, and their streams. Linear in the number of instructions."""
    device_streams = DeviceStreams(devices)
    is_serial = not threaded and streams is None and all(device.type == "cpu" for device in devices)
    joins = is_serial and may_join_backward(program, [cell.parameters for cell in cells])
    builder = (build or CodeBuilder)(program, cells, devices, streams or device_streams, threaded=threaded, joins=joins)
    launches_on = streams or (device_streams if device_streams.is_asynchronous else None)
    if launches_on is None:
        rows = tuple(tuple(builder.run(instruction, d) for instruction in row) for d, row in enumerate(program.rows))
    else:
        rows = builder.launched()
    walk = in_turn(program) if is_serial else merged(program)
    freed = dict.fromkeys(walk, ()) if launches_on is not None else frees_after(program, walk)
    flat = tuple(then_free(rows[d][i], [builder.register(o, d) for o in frees]) for (d, i), frees in freed.items())
    return Code(program, rows, tuple(freed), flat, len(builder.registers), len(builder.channels), threaded, launches_on)


class CodeBuilder:
    """Makes the functions of a program's instructions. With `joins`, I runs the whole backward and W does nothing."""

    def __init__(
        self,
        program: Program,
        cells: Sequence[Cell | VariantCell],
        devices: Sequence[torch.device],
        streams: Streams | None = None,
        *,
        threaded: bool = False,
        joins: bool = False,
    ) -> None:
        self.program, self.cells, self.devices = program, cells, devices
        self.streams, self.threaded, self.joins = streams or DeviceStreams(devices), threaded, joins
        self.locks, self.is_launched, self.received = StageLocks(program, threaded=threaded), False, set[int]()
        self.registers, self.channels = dict[object, int](), dict[object, int]()
        self.links, self.divided = dict[tuple[int, int], Link](), dict[int, DividedBackward]()
        self.left, self.kept = LeftTensors.of(cells), BackwardReads.of(program, cells, threaded=threaded)
        self.recomputes = Kind.RECOMPUTE in {i.action.kind for row in program.rows for i in row if i.action is not None}
        effects, self.memos = [one for cell in cells for one in cell.all_effects], CallMemos.of(cells)
        self.log = ChangeLog() if self.recomputes and any(one.holders for one in effects) else None
        reaches = self.recomputes or bool(self.left.places)
        self.turns = StateTurns.of(cells, threaded=threaded, reaches=reaches, hooked=self.kept.hooked)
        self.recomputes = self.recomputes or any(one.redraws for one in effects)

    def register(self, operand: Operand, device: int) -> int:
        """Return the register of an operand on a device, a new one at the first request."""
        key = (device, operand.value.name, operand.value.consumer, operand.slot)
        return self.registers.setdefault(key, len(self.registers))

    def run(self, instruction: Instruction, device: int) -> Run:
        """Return the function of an instruction."""
        match instruction.op:
            case Op.COMPUTE:
                return self.compute(instruction, device)
            case Op.SEND:
                return self.send(instruction, device)
            case Op.RECV:
                return self.receive(instruction, device)
            case Op.FREE:
                return then_free(_nothing, [self.register(instruction.reads[0], device)])
            case Op.BROADCAST | Op.REDUCE:
                raise AssertionError("within one process, mirrors refresh and sum tied parameters")

    def launched(self) -> tuple[tuple[Run, ...], ...]:
        """Return the functions such that each runs on its stream, after the events that it waits for."""
        planned, self.is_launched = launches(self.program, self.streams.apart), True
        followers, follows = dict[Place, list[int]](), dict[Place, list[int]]()
        for place, launch in (((d, i), one) for d, row in enumerate(planned) for i, one in enumerate(row)):
            for before in launch.follows if self.threaded else ():
                channel = self.channels.setdefault((before, place), len(self.channels))
                followers.setdefault(before, []).append(channel)
                follows.setdefault(place, []).append(channel)
        return tuple(
            tuple(
                launched(
                    self.task(launch, d, i),
                    launch,
                    None if launch.lane is None else self.streams.stream(launch.lane),
                    follows.get((d, i), ()),
                    followers.get((d, i), ()),
                )
                for i, launch in enumerate(row)
            )
            for d, row in enumerate(planned)
        )

    def task(self, launch: Launch, device: int, index: int) -> StreamTask:
        """Return an instruction's function with its place, the registers that it reads and those that it writes."""
        instruction = self.program.rows[device][index]
        sides = instruction.reads, instruction.writes
        reads, writes = (tuple(self.register(operand, device) for operand in side) for side in sides)
        place, op, buffer = (device, index), instruction.op, launch.buffer
        if buffer is not None:
            buffer = self.registers.setdefault(("buffer", buffer), len(self.registers))
        if launch.lane is None and buffer is None:
            return StreamTask(place, op, free_received(reads[0], self.streams.release(device)), reads, writes)
        if launch.lane is not None and STORE in launch.lane:
            run = self.compute(instruction, device, {"buffer": buffer, "allocate": self.streams.allocator(device)})
            return StreamTask(place, op, run, reads, writes if buffer is None else (buffer, *writes))
        if buffer is None:
            received = tuple(self.received.intersection(reads))
            return StreamTask(place, op, self.run(instruction, device), reads, writes, received)
        self.received.update(writes)
        if launch.lane is None:
            return StreamTask(place, op, take_from(buffer, writes[0]), (buffer,), writes)
        link = self.link(*launch.lane)
        if op is Op.SEND:
            return StreamTask(place, op, copy_into(buffer, reads[0], link), reads, (buffer,))
        value = instruction.writes[0].value
        run = upload_into(buffer, writes[0], (value.name, value.consumer is not None), value.microbatch, link)
        return StreamTask(place, op, run, (), (buffer, *writes))

    # -- compute --------------------------------------------------------------------------------------------------

    def compute(self, instruction: Instruction, device: int, beside: Mapping[str, Any] | None = None) -> Run:
        """Return the function of a compute instruction. `beside`: how `copy_cell` copies on a stream of its own."""
        action = instruction.action
        assert action is not None
        registers = CellRegisters(instruction, partial(self.register, device=device))
        if action.kind in SHARDING:
            return self.sharding(action)
        if action.kind in (Kind.OFFLOAD, Kind.RELOAD):
            from pipecompile.runtime.cells.offload import copy_cell

            cell: Callable[[Action, CellRegisters, torch.device], Run] = partial(copy_cell, **(beside or {}))
        else:
            cell = self.forward if action.kind in (Kind.FORWARD, Kind.RECOMPUTE) else self.backward
        name = str(in_slices(action, self.program.n_slices))
        run = self.memos.around(self.kept.around(cell(action, registers, self.devices[device]), action), action)
        return self.timed(self.locks.around(self.turns.around(run, action), action), device, name)

    def timed(self, run: Run, device: int, name: str) -> Run:
        """Return the function of a cell, which notes its times, in a range of the profiler, with its GPU as the current one."""
        return timed_cell(run, device, name, self.devices[device], is_launched=self.is_launched)

    def sharding(self, _action: Action) -> Run:
        """Return the function of an action on parameters that copies of the pipeline shard. In one process there is one copy."""
        return _nothing

    def forward(self, action: Action, registers: CellRegisters, device: torch.device) -> Run:
        """Return the function of an F or an R."""
        cell = self.cells[action.stage]
        if not isinstance(cell, VariantCell):
            return self.left.forward(self.forward_of(cell, action, registers, device), action.stage)
        variants = cell.variants
        chosen = chosen_run(action.microbatch, lambda n: self.forward_of(variants[n], action, registers, device))
        return self.left.forward(chosen, action.stage)

    def forward_of(self, cell: Cell, action: Action, registers: CellRegisters, device: torch.device) -> Run:
        """Return the function of an F or an R of one cell."""
        s, m = action.stage, action.microbatch
        is_offloaded = offloaded(s, m).name in registers.writes
        saved_state, recipe_name = (offloaded if is_offloaded else saved)(s, m), recipe(s, m).name
        function = self.left.around(cell.code.for_slot(registers.slot_of(saved_state), stays=not is_offloaded), s, m)
        plain = StageRun(function, m if cell.is_sized else None, cell.effects, device, self.log)
        stage = slice_run(cell.slices, registers, keys_values(s, m).name, plain)
        inputs = [registers.reads[name] for name in cell.inputs]
        if action.kind is Kind.RECOMPUTE:
            return recompute_cell(stage, inputs, registers.reads[recipe_name], registers.writes[saved_state.name])
        outputs = [registers.writes[name] for name in cell.outputs]
        if recipe_name in registers.writes:
            return checkpointed_cell(stage, inputs, outputs, registers.writes[recipe_name])
        save_to, casts = registers.writes.get(saved_state.name), cell.effects.casts
        if isinstance(stage, SliceRun):
            return sliced_forward(stage, inputs, outputs, save_to)
        run = forward_cell(function, inputs, outputs, save_to, stage.size_of, casts=casts)
        if is_offloaded:
            from pipecompile.runtime.cells.offload import offloaded_forward

            run = offloaded_forward(run, cell.module, registers.writes[saved_state.name])
        return kept_apart(run, stage, saves=save_to is not None, recomputes=self.recomputes)

    def backward(self, action: Action, registers: CellRegisters, device: torch.device) -> Run:
        """Return the function of a B, I or W."""
        s, m = action.stage, action.microbatch
        cell, remainder = self.cells[s], weight_saved(s, m).name
        divided = self.divided.setdefault(s, DividedBackward(device.type))
        if action.kind is Kind.WEIGHT_GRAD:
            return _nothing if self.joins else weight_cell(registers.reads[remainder], divided)
        saved_state = registers.reads[saved(s, m).name]
        gradients, sent = registers.output_gradients(cell.outputs), registers.input_gradients(cell.inputs)
        added = registers.added_gradients(cell.inputs)
        if own := registers.all_of(keys_values(s, m).name):
            return then_add(sliced_backward(saved_state, gradients, sent, own[-1], unshared_places(cell)), added)
        if action.kind is Kind.BACKWARD or self.joins:
            run = backward_cell(saved_state, gradients, sent, unshared_places(cell))
        else:
            run = input_cell(saved_state, gradients, sent, registers.writes[remainder], divided)
        return then_add(self.left.backward(run, s, m, saved_state), added)

    # -- transfers ------------------------------------------------------------------------------------------------

    def send(self, instruction: Instruction, device: int) -> Run:
        """Return the function of a SEND."""
        (operand,), peer = instruction.reads, instruction.peer
        register, value = self.register(operand, device), operand.value
        if peer == HOST:
            if value.consumer is not None:
                return transport.depart_gradient((value.name, True), value.microbatch, register, value.consumer)
            return transport.depart((value.name, False), value.microbatch, register)
        assert peer is not None
        channel = self.channel(value, device, peer)
        return transport.send(register, channel, self.link(device, peer), threaded=self.threaded)

    def receive(self, instruction: Instruction, device: int) -> Run:
        """Return the function of a RECV."""
        (operand,), peer = instruction.writes, instruction.peer
        register, value = self.register(operand, device), operand.value
        if peer == HOST:
            key = value.name, value.consumer is not None
            return transport.arrive(key, value.microbatch, register, self.devices[device])
        assert peer is not None
        channel = self.channel(value, peer, device)
        return transport.receive(register, channel, self.link(peer, device), threaded=self.threaded)

    def channel(self, value: Value, source: int, target: int) -> int:
        """Return the channel of a value between two devices, a new one at the first request."""
        return self.channels.setdefault((value, source, target), len(self.channels))

    def link(self, source: int, target: int) -> Link:
        """Return the link between two devices."""
        ends = source, target
        return self.links.get(ends) or self.links.setdefault(ends, self.streams.link(*ends))


def _nothing(_frame: Frame) -> None:
    """Run nothing: the code of a W if I does the whole backward, and of a FREE before it frees."""
