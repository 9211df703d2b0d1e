"""The code of one rank: the instructions of its row as functions of a frame, with SEND and RECV bound to a `ValueTransport`.

    gloo      RECV v#0 from 0   1F0 ...   SEND w#0 to 2        one after the other, each over when it returns
    direct    from 0: RECV v#0 ■    compute: 1F0 ■    to 2: SEND w#0          launched in this order, ordered by events

Launches come in the order of the row. That order is proven to end if each send waits for its receive and nothing overtakes
(level MEETINGS of the verifier): so it ends as well where all communicators of a GPU share one queue of launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pipecompile.distributed.data_parallel.sharded_row import ShardedRow
from pipecompile.distributed.messages.value_transport import ValueTransport
from pipecompile.graph.merge_laws import has_unknown_size
from pipecompile.ir import AUX, HOST, LOSS, SHARDING, Action, Instruction, Kind, Op, Program, Value
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.interpreter import CodeBuilder
from pipecompile.runtime.profiler_ranges import timed
from pipecompile.runtime.registers import Frame, Run
from pipecompile.runtime.stream_events import Launch, row_launches
from pipecompile.runtime.streams import Streams, StreamTask, launched
from pipecompile.torch_private.dtensors import waited
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["RankCodeBuilder", "fixed_names"]


class RankCodeBuilder(CodeBuilder):
    """Binds the row of pipeline device `rank`. `fixed` are the names of the values whose layout the recording fixes, and `parameters`
    those of the row.
    """

    def __init__(
        self,
        program: Program,
        cells: Sequence[Cell | VariantCell],
        devices: Sequence[torch.device],
        values: ValueTransport,
        rank: int,
        fixed: frozenset[str] = frozenset(),
        parameters: ShardedRow | None = None,
    ) -> None:
        super().__init__(program, cells, devices, values.streams)
        self.values, self.rank, self.fixed, self.parameters = values, rank, fixed, parameters

    def row(self) -> tuple[Run, ...]:
        """Return the functions of the row's instructions."""
        row = self.program.rows[self.rank]
        if self.values.streams is None:
            return tuple(self.run(instruction, self.rank) for instruction in row)
        return self.launched_row(self.values.streams)

    def launched_row(self, streams: Streams) -> tuple[Run, ...]:
        """Return the functions such that each launches on its stream, after the events that it waits for."""
        planned = row_launches(self.program, self.rank, streams.apart)
        tasks = [self.task(launch, self.rank, index) for index, launch in enumerate(planned)]
        lanes = [None if launch.lane is None else streams.stream(launch.lane) for launch in planned]
        return tuple(map(launched, tasks, planned, lanes))

    def task(self, launch: Launch, device: int, index: int) -> StreamTask:
        """Return an instruction's function with its registers; a value that is received goes into a receive buffer."""
        instruction = self.program.rows[device][index]
        if instruction.op is not Op.RECV or instruction.peer == HOST or launch.buffer is None:
            return super().task(launch, device, index)
        buffer = self.registers.setdefault(("buffer", launch.buffer), len(self.registers))
        (register,) = (self.register(operand, device) for operand in instruction.writes)
        self.received.add(register)
        run = _into_buffer(self.receive(instruction, device), register, buffer)
        return StreamTask((device, index), Op.RECV, run, (), (buffer, register))

    def compute(self, instruction: Instruction, device: int, beside: Mapping[str, Any] | None = None) -> Run:
        """Return the function of a compute instruction, which waits for the parameters of its stage, and for the collectives whose results
        leave it: what uses these runs on other streams, and a rank that does not come to one is not the rank that they are sent to.
        """
        run, action = super().compute(instruction, device, beside), instruction.action
        if action is None or action.kind in (*SHARDING, Kind.OFFLOAD, Kind.RELOAD):
            return run
        leaving = [o for o in instruction.writes if o.value.name == AUX or not o.value.name.startswith("@")]
        outputs = [self.register(operand, device) for operand in leaving]
        run = _then_waited(run, outputs) if outputs else run
        if self.parameters is None:
            return run
        return self.parameters.around(action, run, outputs if action.kind is Kind.FORWARD else ())

    def sharding(self, action: Action) -> Run:
        """Return the function of an action on the parameters of a stage, which notes its times."""
        if self.parameters is None:
            return super().sharding(action)
        return timed(self.parameters.run(action), self.rank, str(action))

    def send(self, instruction: Instruction, device: int) -> Run:
        peer, values = instruction.peer, self.values
        if peer is None or peer == HOST:
            return super().send(instruction, device)
        (operand,) = instruction.reads
        index, name, layout = self.register(operand, device), str(operand.value), self.layout(operand.value)
        is_gradient = operand.value.consumer is not None

        def run_send(frame: Frame) -> None:
            values.send(peer, name, frame.registers[index], layout(frame), is_gradient=is_gradient)

        return run_send

    def receive(self, instruction: Instruction, device: int) -> Run:
        peer, values = instruction.peer, self.values
        if peer is None or peer == HOST:
            return super().receive(instruction, device)
        (operand,) = instruction.writes
        index, name, layout = self.register(operand, device), str(operand.value), self.layout(operand.value)

        def run_receive(frame: Frame) -> None:
            frame.registers[index] = values.receive(peer, name, layout(frame))

        return run_receive

    def layout(self, value: Value) -> Callable[[Frame], Hashable]:
        """Return the function from a frame to the key of a value's layout: None if the recording does not fix the layout."""
        name, consumer, microbatch = value.name, value.consumer, value.microbatch
        if name not in self.fixed:
            return _unknown
        return lambda frame: (name, consumer, frame.sizes[microbatch])


def _unknown(_frame: Frame) -> None:
    """Return no key."""


def _then_waited(run: Run, outputs: Sequence[int]) -> Run:
    """Return a computation after which this thread, or the current stream, waits for the results of collectives among its outputs."""

    def run_and_wait(frame: Frame) -> None:
        run(frame)
        for index in outputs:
            waited(frame.registers[index])

    return run_and_wait


def _into_buffer(run: Run, register: int, buffer: int) -> Run:
    """Return a RECV that keeps its tensor in a buffer too. The buffer's last tensor goes first: its memory serves the next."""

    def run_receive(frame: Frame) -> None:
        frame.registers[buffer] = frame.registers[register] = None
        run(frame)
        value = frame.registers[register]
        frame.registers[buffer] = value if isinstance(value, torch.Tensor) else None

    return run_receive


def fixed_names(graph: fx.GraphModule, cells: Sequence[Cell | VariantCell]) -> frozenset[str]:
    """Return the names of the values whose layout is fixed by the recording and the size of the micro-batch.

    Not among them are objects, and tensors of which the data decide a size. Several recordings share names, and fix nothing.
    """
    if not isinstance(graph, TracedGraph) or any(isinstance(cell, VariantCell) for cell in cells):
        return frozenset()
    symbol = graph.facts.symbol
    named = ((node.name, value_of(node)) for node in graph.graph.nodes)
    tensors = ((name, value) for name, value in named if isinstance(value, torch.Tensor))
    return frozenset({LOSS, *(name for name, value in tensors if not has_unknown_size(value, symbol))})
