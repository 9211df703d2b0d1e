"""A lowered program bound to stages and devices: what `step` and `pipe(x)` run, made once per number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import fx

from pipecompile.ir import HOST, UNTRAINED, Instruction, Op, Program
from pipecompile.ir.directions import stage_devices
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.runtime.backward_draws import BackwardDraws, WatchingBuilder
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from pipecompile.runtime.cells.left_places import LeftPlaces
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.cuda_graphs.step_graphs import StepGraphs
from pipecompile.runtime.dispatch import run_inline
from pipecompile.runtime.forward_order import ForwardOrders
from pipecompile.runtime.held_hooks import HeldHooks
from pipecompile.runtime.hooked_updates import Before, HookedUpdates, read_state
from pipecompile.runtime.interpreter import Code, bind
from pipecompile.runtime.list_order import ListOrders
from pipecompile.runtime.partitions import CardPartition, PartitionStreams
from pipecompile.runtime.present_hooks import PresentHooks
from pipecompile.runtime.random_draws import Draws, ForwardDraws
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import InstructionFailure, Peaks, microbatch_of, run_error
from pipecompile.runtime.thread_state import StagesInThreads
from pipecompile.runtime.worker_threads import WorkerThreads
from pipecompile.tracing.ambient_modes import contained

__all__ = ["Executable", "ProgramBinding"]


@dataclass(frozen=True, slots=True)
class ProgramBinding:
    """A program, with the cells and devices that it runs on, and the tensors that runs share.

    `peaks` returns the predicted peak of each pipeline device in bytes; None if there is no prediction. `partitions` are the parts
    of one card that the devices are; () if they are whole devices. `step_graphs` runs the program as one CUDA graph where it can;
    None if that is not asked for.
    """

    program: Program
    cells: Sequence[Cell | VariantCell]
    devices: Sequence[torch.device]
    graph: fx.GraphModule
    mirrors: Mirrors
    norms: DeferredNorms = field(default_factory=DeferredNorms)
    peaks: Peaks | None = None
    partitions: Sequence[CardPartition] = ()
    step_graphs: StepGraphs | None = None


class Executable:
    """One program, ready to run any number of times. Frames of runs that succeeded serve again; others are dropped."""

    def __init__(self, binding: ProgramBinding) -> None:
        self.program, self.cells, self.devices = binding.program, binding.cells, tuple(binding.devices)
        self.graph, self.mirrors, self.norms = binding.graph, binding.mirrors, binding.norms
        self.peaks, self.partitions = binding.peaks, tuple(binding.partitions)
        self.step_graphs = binding.step_graphs
        self.parameters = tuple(
            dict.fromkeys(own for graph in (self.graph, *self._graphs) for own in graph.parameters())
        )
        self.updates = HookedUpdates(self.parameters, self.program, read_state(self.cells), holds=True)
        self.backward_draws, self.forward_draws = BackwardDraws(), ForwardDraws()
        self._hooks = PresentHooks((module for cell in self.cells for module in cell.modules), self.parameters)
        self._shows_now = False
        self._idle: dict[bool, list[Frame]] = {False: [], True: []}
        self._held = {threaded: HeldHooks(self.program, self.cells) for threaded in (False, True)}
        self._warnings: dict[tuple[bool, Draws], str] = {}
        self.orders, self._in_threads = ForwardOrders(self.program, self.cells), StagesInThreads(self.cells)
        self._list_orders = ListOrders(self.program, self.cells)

    @property
    def _graphs(self) -> list[fx.GraphModule]:
        """The recordings of cells of several."""
        return [graph for cell in self.cells if isinstance(cell, VariantCell) for graph in cell.graphs.values()]

    def is_ordered_now(self) -> bool:
        """Look for hooks that were registered since the last step, and return whether the order of cells shows. Watch backwards again
        if gradients or layers have new hooks.
        """
        if self._hooks.look():
            self.backward_draws.watch_again()
        self._shows_now = bool(self._hooks or self.backward_draws.stages)
        return self.is_ordered

    @property
    def is_ordered(self) -> bool:
        """Whether the order of cells or their thread shows: stages draw random numbers, run user code that may leave something
        behind, read a `threading.local`, or set kernels for a part of a forward; or stages have several copies, whose gradients are
        added in the order of the cells. Hooks and draws of backwards count as `is_ordered_now` has found them.
        """
        return self._is_ordered_as_recorded or self._shows_now

    @cached_property
    def _is_ordered_as_recorded(self) -> bool:
        """Whether the order of cells shows without hooks on gradients and hooks that were registered later."""
        effects = [one for cell in self.cells for one in cell.all_effects]
        shows = any(one.draws or one.runs_python for one in effects) or bool(self.program.directions)
        return shows or bool(self._in_threads)

    def draw_warning(self, *, threaded: bool) -> str:
        """Return a warning if random numbers are drawn in another order than in the plain loop; "" if not.

        Whether the loss and backwards draw is known after the first run. On GPUs, which have a generator each, the order is not asked for.
        """
        drew = {s for s, cell in enumerate(self.cells) if any(one.has_drawn for one in cell.all_effects)}
        stages = tuple(sorted(drew | self.forward_draws.stages))
        key = threaded, Draws(stages, tuple(sorted(self.backward_draws.stages)))
        if key not in self._warnings:
            self._warnings[key] = self._draw_warning(key[1], threaded=threaded)
        return self._warnings[key]

    def _draw_warning(self, draws: Draws, *, threaded: bool) -> str:
        stages = {*draws.forward, *draws.backward}
        if not stages or any(device.type != "cpu" for device in self.devices):
            return ""
        devices, actions = stage_devices(self.program), (self.program.rows[d][i].action for d, i in self.inline.order)
        is_threaded = threaded and len(set().union(*(devices[s] for s in stages))) > 1
        is_ordered = draws.is_that_of_the_loop(one for one in actions if one is not None)
        return "" if is_ordered and not is_threaded else draws.warning(threaded=is_threaded, in_order=is_ordered)

    def _updated_buffers(self) -> dict[int, str]:
        """Return the names of the buffers that forwards may write, by id: all but those of deferred layers."""
        deferred = {id(buffer) for norm in self.norms.norms for buffer in norm.layer.buffers()}
        named = (pair for graph in (self.graph, *self._graphs) for pair in graph.named_buffers())
        return {id(one): name for name, one in named if id(one) not in deferred}

    @cached_property
    def left_places(self) -> tuple[LeftPlaces, ...]:
        """The places in which stages may leave tensors on objects."""
        effects = (cell.all_effects for cell in self.cells)
        return tuple(LeftPlaces(each) for each in effects if any(one.leaves_values for one in each))

    @cached_property
    def inline(self) -> Code:
        """The code for one thread."""
        return self._bound(threaded=False)

    @cached_property
    def threaded(self) -> Code:
        """The code for a thread per device. The first use warns of what shows then."""
        self._in_threads.warn()
        return self._bound(threaded=True)

    def code(self, *, threaded: bool) -> Code:
        """Return the code for a thread per device, or for one thread."""
        return self.threaded if threaded else self.inline

    def _bound(self, *, threaded: bool) -> Code:
        streams = PartitionStreams(self.partitions) if self.partitions else None
        build = partial(WatchingBuilder, self.backward_draws, self.forward_draws, self._held[threaded])
        return bind(self.program, self.cells, self.devices, threaded=threaded, streams=streams, build=build)

    @cached_property
    def halves(self) -> tuple[Code, Code]:
        """The inline code up to the first backward of each device, and the inline code from there on."""
        code, split = self.inline, [_first_backward(row) for row in self.program.rows]
        pairs = list(zip(code.order, code.flat, strict=True))
        first, second = (
            replace(code, order=tuple(place for place, _ in half), flat=tuple(run for _, run in half))
            for half in (
                [pair for pair in pairs if pair[0][1] < split[pair[0][0]]],
                [pair for pair in pairs if pair[0][1] >= split[pair[0][0]]],
            )
        )
        return first, second

    @property
    def _own_cells(self) -> Sequence[Cell | VariantCell]:
        """The cells that this process runs."""
        return self.cells

    def frame(self, sizes: tuple[int, ...], arrivals: dict[tuple[str, bool], Any], *, threaded: bool = False) -> Frame:
        """Return a frame for one mini-batch with micro-batches of these sizes, in samples. Refresh mirrors and cells for the run. Warn if
        what forwards write comes out in another order than in the plain loop.
        """
        self.orders.warn_of_stages(self._updated_buffers, lambda: self.inline.order, threaded=threaded)
        self._list_orders.warn(lambda: self.inline.order, threaded=threaded)
        self.mirrors.refresh()
        if self.norms.norms:
            self.norms.begin()
        for cell in self._own_cells:
            cell.code.refresh()
        frame = self._idle[threaded].pop() if self._idle[threaded] else self._new_frame(threaded)
        frame.sizes, frame.arrivals, frame.spans = sizes, arrivals, []
        frame.departures = {(n, back): [{} if back else None for _ in sizes] for n, back in self._departing}
        return frame

    def _new_frame(self, threaded: bool) -> Frame:
        code = self.threaded if threaded else self.inline
        channels: list[Any] = [SimpleQueue() if threaded else None for _ in range(code.n_channels)]
        return Frame([None] * code.n_registers, channels)

    def finished(self, frame: Frame, *, threaded: bool = False) -> None:
        """Take back the frame of a run that succeeded. Write back gradients of mirrors and statistics of deferred layers."""
        self._settle()
        if (self.threaded if threaded else self.inline).streams is not None:
            frame.registers = [None] * len(frame.registers)  # of receive buffers; the next run waits before it copies
        frame.arrivals, frame.departures, frame.recordings, frame.left, frame.kept = {}, {}, (), {}, {}
        frame.objects = {}
        frame.ended.clear()
        self._idle[threaded].append(frame)

    def _settle(self) -> None:
        """Write mirrors back, then the statistics of deferred layers: their counters are among the mirrors."""
        self.mirrors.settle()
        if self.norms.norms:
            self.norms.settle()

    @cached_property
    def _departing(self) -> tuple[tuple[str, bool], ...]:
        """(name, is gradient) of the values that the program sends to the host."""
        sent = [i.reads[0].value for row in self.program.rows for i in row if i.op is Op.SEND and i.peer == HOST]
        return tuple(dict.fromkeys((value.name, value.consumer is not None) for value in sent))

    def run(self, code: Code, frame: Frame, workers: WorkerThreads | None = None) -> None:
        """Run code on a frame, in this thread or in workers. Raise RunError with stage, micro-batch and the user's line."""
        is_half = any(code is half for half in self.__dict__.get("halves", ()))  # of `pipe(x)`: autograd runs the hooks
        before = None if is_half else self.updates.before()
        frame.has_hooks = bool(self._hooks) or (before is not None and bool(before.hooked or before.watched))
        try:
            with self._holding(code, before), self.orders.loss_watched(threaded=code.threaded):
                self._launch(code, frame, workers)
        except InstructionFailure as failure:
            failed = [self.explained(failure, frame)]
            self._abandon(code, frame)
            self.updates.note_hooks()
        except BaseException:  # Ctrl-C while threads run: they may still use the frame
            self.norms.forget()
            raise
        else:
            if before is not None:
                self.updates.check(before)
            return
        raise failed.pop()  # a name for the error would keep it in a circle with this frame

    def _holding(self, code: Code, before: Before | None) -> AbstractContextManager[None]:
        """Return a context in which hooks are held that several backwards of a micro-batch would run."""
        if before is None or not (before.hooked or before.watched):
            return nullcontext()
        return self._held[code.threaded].during(before.hooked, before.watched)

    def _launch(self, code: Code, frame: Frame, workers: WorkerThreads | None) -> None:
        """Run code on a frame: as one CUDA graph if it can be one, else on its streams. Raise InstructionFailure."""
        if self.step_graphs is not None and code is self.__dict__.get("inline"):
            with contained():
                if self.step_graphs.run(frame):
                    return
        if code.streams is not None:
            code.streams.fork(frame)
        with contained(), self._in_threads.kernels_restored() if workers else nullcontext():
            run_inline(code, frame) if workers is None else workers.run(code, frame)
        if code.streams is not None:
            code.streams.join()

    def _abandon(self, code: Code, frame: Frame) -> None:
        """Drop what a failed run holds, when no stream uses it any more: the exception keeps the frame alive."""
        self.norms.forget()
        if code.streams is not None:
            with suppress(RuntimeError):  # the error of the run, once more
                code.streams.finish()
        frame.clear()

    def explained(self, failure: InstructionFailure, frame: Frame) -> BaseException:
        """Return the error to raise for a failure, with the line of the micro-batch's recording."""
        cell, microbatch = self.cells[0], microbatch_of(failure, self.program)
        number = frame.recordings[microbatch] if isinstance(cell, VariantCell) and frame.recordings else None
        graph = self.graph if number is None else cell.graphs[number]  # type: ignore[union-attr]
        stage_graph, has_hooks = self._stage_graph(failure, number), self.updates.has_hooks
        return run_error(failure, self.program, graph, self.peaks, stage_graph, has_hooks=has_hooks)

    def _stage_graph(self, failure: InstructionFailure, number: int | None) -> fx.Graph | None:
        """Return the graph of the stage that failed, in recording `number`; None if no stage did."""
        action = self.program.rows[failure.device][failure.index].action
        if action is None:
            return None
        cell = self.cells[action.stage]
        module = (cell.variants[number or 0] if isinstance(cell, VariantCell) else cell).module
        return module.graph if isinstance(module, fx.GraphModule) else None


def _first_backward(row: Sequence[Instruction]) -> int:
    """Return the index at which the backward half of a GPipe row begins: its first backward or received gradient."""
    for index, instruction in enumerate(row):
        is_gradient = instruction.op is Op.RECV and instruction.writes[0].value.consumer is not None
        if is_gradient or (instruction.action is not None and instruction.action.kind not in UNTRAINED):
            return index
    return len(row)
