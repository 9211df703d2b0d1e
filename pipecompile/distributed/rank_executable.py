"""The part of a bound program that one rank runs: the row of its device, with SEND and RECV bound to a transport of values.

device 1   RECV v#0 from 0   1F0 ...   SEND w#0 to 2        rank 1   receive v#0 from rank 0, run the cell, send w#0 to rank 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from pipecompile.distributed.agreement.stale_values import StaleValues
from pipecompile.distributed.collectives import COLLECTIVE_PART
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.gradient_exchange import completed, exchange_order
from pipecompile.distributed.data_parallel.replicas import Replicas
from pipecompile.distributed.data_parallel.sharded_row import ShardedRow
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.messages.row_messages import (
    Departure,
    departures,
    directed_pairs,
    incoming,
    sending_action,
    summary,
)
from pipecompile.distributed.messages.value_transport import StepState, ValueTransport
from pipecompile.distributed.rank_code import RankCodeBuilder, fixed_names
from pipecompile.distributed.stage_copies import check_placed
from pipecompile.distributed.tied_copies import TiedCopies
from pipecompile.ir import LOSS, SHARDING, UNTRAINED, Kind
from pipecompile.ir.directions import Placement, all_placements, stages_on
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.runtime.cells.stage_cells import Cell
from pipecompile.runtime.cells.variant_cells import VariantCell
from pipecompile.runtime.dispatch import run_inline
from pipecompile.runtime.executable import Executable, ProgramBinding
from pipecompile.runtime.hooked_updates import HookedUpdates, read_state
from pipecompile.runtime.interpreter import Code
from pipecompile.runtime.registers import Frame, Run
from pipecompile.runtime.results import require_gradient
from pipecompile.runtime.run_errors import InstructionFailure
from pipecompile.runtime.worker_threads import WorkerThreads
from pipecompile.tracing.ambient_modes import contained
from pipecompile.tracing.state.preserved_run import state_tensors

__all__ = ["RankExecutable"]

_HOOK_ADVICE = ".grad after the step"


class RankExecutable(Executable):
    """A program of which this rank runs the row of its device.

    Values that go to the host reach all ranks, except gradients of inputs. With replicas of the pipeline, gradients are reduced
    as soon as the row has completed them. Those of tied weights wait for the end, since other ranks add to them.
    """

    def __init__(
        self,
        binding: ProgramBinding,
        *,
        communicator: Communicator,
        values: ValueTransport,
        placements: Sequence[Placement],
        replicas: Replicas,
        stale_values: StaleValues | None = None,
    ) -> None:
        """`placements` are those of the stages, and of their copies, of which ranks have the parameters. `stale_values` knows the tensors
        that live on other ranks.
        """
        check_placed(all_placements(binding.program), placements)
        super().__init__(binding)
        self.communicator, self.device, self._agreed = communicator, communicator.ranks.index, -1
        self.values, self.replicas, self._old = values, replicas, stale_values or StaleValues(dict)
        self._own = frozenset(stages_on(self.program, self.program.n_devices)[self.device])
        away = [cell for stage, cell in enumerate(self.cells) if stage not in self._own]
        effects = [one for cell in away for one in cell.all_effects]
        self._old.note_written(buffer for one in effects for buffer in one.written_buffers)
        self._connected: Mirrors | None = None
        self._order: tuple[frozenset[int], str] | None = None
        self.updates = self._own_updates()

    def _own_updates(self) -> HookedUpdates:
        """Return what notices changes of the state of this rank's stages; of none if the program has it sharded meanwhile."""
        actions = (instruction.action for instruction in self.program.rows[self.device])
        is_sharded = any(action is not None and action.kind in SHARDING for action in actions)
        own = [] if is_sharded else self._own_cells
        weights = (weight for cell in own for module in cell.modules for weight in module.parameters())
        return HookedUpdates(dict.fromkeys(weights), self.program, read_state(own))

    @property
    def _own_cells(self) -> Sequence[Cell | VariantCell]:
        """The cells of the stages of which this rank has a copy."""
        return [cell for stage, cell in enumerate(self.cells) if stage in self._own]

    def draw_warning(self, *, threaded: bool) -> str:  # noqa: ARG002 a rank has threads of its own
        """Return no warning: each process has generators of its own."""
        return ""

    @property
    def tied(self) -> TiedCopies:
        """The copies of tensors that several ranks use."""
        assert isinstance(self.mirrors, TiedCopies)
        return self.mirrors

    @cached_property
    def inline(self) -> Code:
        fixed = fixed_names(self.graph, self.cells)
        row = self.sharded
        builder = RankCodeBuilder(self.program, self.cells, self.devices, self.values, self.device, fixed, row)
        runs = tuple(self._then_reduce(run, self._complete.get(index)) for index, run in enumerate(builder.row()))
        order = tuple((self.device, index) for index in range(len(runs)))
        n_registers, streams = len(builder.registers), self.values.streams
        return Code(self.program, (runs,), order, runs, n_registers, 0, threaded=False, streams=streams)

    def frame(self, sizes: tuple[int, ...], arrivals: dict[tuple[str, bool], Any], *, threaded: bool = False) -> Frame:
        """Return a frame. Before the first, the ranks agree on the program and open their channels."""
        if self._agreed != self.communicator.renewals:
            self.communicator.agree("program of the step", self._summary, in_copy=True)
            self.communicator.connect()
        with self._blaming(is_begun=False):
            self._agreed = self.communicator.renewals
            if self._connected is not self.mirrors:
                self.values.connect(directed_pairs(self.program) | self.tied.pairs)
                self._connected = self.mirrors
            self.replicas.agree(f"{self._summary} on weights {self._exchanged(self.replicas.loss_weights)}")
            self.sharded.begin()
            self.values.begin(lambda: StepState(f"{self._summary}, samples {sizes}", self._own_state(arrivals)))
            return super().frame(sizes, arrivals, threaded=threaded)

    def run(self, code: Code, frame: Frame, workers: WorkerThreads | None = None) -> None:
        """Run the row, then share the departures. Raises RunError for a failure of this rank, RankLost for another rank's."""
        assert workers is None
        failed, before = list[BaseException](), self.updates.before()
        hooked, has_copies = (*before.hooked, *before.watched), bool(self.program.directions)
        self._held[False].warn_of(hooked, _HOOK_ADVICE, has_copies=has_copies)
        with (
            self._blaming(), ExitStack() as after, self._old.hidden(self._absent), self.tied.unhooked(),
            self.orders.loss_watched(threaded=False),
        ):  # fmt: skip
            try:
                if code.streams is not None:
                    code.streams.fork(frame)
                with contained():
                    for source, names in self._incoming.items():
                        self.values.expect(source, names)
                    run_inline(code, frame)
                    self._check_losses(frame)
                    self._share(frame)
            except InstructionFailure as failure:
                failed.append(self._blamable(failure, frame))
            if failed:
                after.callback(self._abandon, code, frame)  # it restores counts of layers, which are hidden here
                raise failed.pop()  # a name for the error would keep it in a circle with this frame
            self.values.finish()
        self.updates.check(before)

    @cached_property
    def _absent(self) -> dict[torch.Tensor, str]:
        """The tensors of the model that live on other ranks and that no stage of this rank uses, with their names."""
        modules = (module for cell in self._own_cells for module in cell.modules)
        return self._old.elsewhere({id(tensor) for module in modules for tensor in state_tensors(module)})

    def _abandon(self, code: Code, frame: Frame) -> None:
        """Drop what a failed run holds. Messages that no peer will meet end first: streams wait for them."""
        self.values.abort()
        super()._abandon(code, frame)

    def finished(self, frame: Frame, *, threaded: bool = False) -> None:
        with self._blaming():
            if self.inline.streams is not None:
                self.inline.streams.join()
            super().finished(frame, threaded=threaded)
            self.values.finish()

    def _settle(self) -> None:
        """Update the statistics of deferred layers, then send them to their homes: the tensors are those that the layers have."""
        if self.norms.norms or self.replicas.is_unlike:
            self.norms.settle()  # copies whose program has such layers wait for those without
        self.mirrors.settle()
        if self.replicas.is_unlike:
            self.norms.share(copy.tensor for copy in self.tied.copies if copy.home == self.device)

    def _own_state(self, arrivals: Mapping[tuple[str, bool], Any]) -> str:
        """Return what may change between steps, and with it the layouts of values: the program, and what has gradients."""
        inputs = (value for key in sorted(arrivals) for value in arrivals[key] if isinstance(value, torch.Tensor))
        flags = [tensor.requires_grad for tensor in (*self._parameters, *inputs)]
        return f"{self._summary} {torch.is_grad_enabled()} {sum(flag << place for place, flag in enumerate(flags)):x}"

    @cached_property
    def _parameters(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.graph.parameters())

    @contextmanager
    def _blaming(self, *, is_begun: bool = True) -> Iterator[None]:
        """Add, to the report of a lost rank, the action that it owed."""
        try:
            yield
        except RankLost as lost:
            raise lost if lost.is_posted else RankLost(self._blamed(lost.report, is_begun), is_posted=False) from None

    def _blamable(self, failure: InstructionFailure, frame: Frame) -> BaseException:
        instruction = self.program.rows[failure.device][failure.index]
        if not isinstance(failure.error, RankLost):
            self.communicator.guard.action = f"at {instruction.action or instruction}"
            return self.explained(failure, frame)
        return failure.error

    def _blamed(self, report: FailureReport, is_begun: bool) -> FailureReport:
        """Name the first action of the lost rank whose result a rank awaits. A rank of another replica has no row here."""
        awaited = {name.partition(" ")[0] for name in self.communicator.board.awaited_from(report.rank, report.awaited)}
        rows = enumerate(self.program.rows)
        row = next((row for device, row in rows if self.communicator.ranks.rank_of(device) == report.rank), ())
        action = sending_action(row, awaited, is_begun=is_begun)
        if action is None:
            return replace(report, action=report.action or f"before {COLLECTIVE_PART} arrived")
        phrase = f"before the result of {action} arrived"
        return replace(report, action=phrase, stage=action.stage, microbatch=action.microbatch)

    def _check_losses(self, frame: Frame) -> None:
        """Raise DetachedLossError on the rank that has computed losses for a backward, if none of them has a gradient."""
        losses = [loss for loss in frame.departures.get((LOSS, False), ()) if isinstance(loss, torch.Tensor)]
        if losses and self._trains:
            require_gradient(losses)

    @cached_property
    def _trains(self) -> bool:
        """Whether this rank's row has a backward."""
        actions = (instruction.action for instruction in self.program.rows[self.device])
        return any(action is not None and action.kind not in (*UNTRAINED, Kind.RECOMPUTE) for action in actions)

    def _share(self, frame: Frame) -> None:
        """Send the departures of this rank to all others, and receive theirs, in one order on all ranks."""
        for departure in self._departures:
            values, name, own = frame.departures[departure.name, False], str(departure), departure.microbatches
            layout = (name, len(own)) if departure.is_stacked else None
            if departure.device == self.device:
                sent = [values[microbatch] for microbatch in own]
                value = torch.stack(sent).detach() if departure.is_stacked else sent[0]
                for peer in range(self.program.n_devices):
                    if peer != self.device:
                        self.values.send(peer, name, value, layout)
            else:
                received = self.values.receive(departure.device, name, layout)
                for microbatch, value in zip(
                    own, received.unbind() if departure.is_stacked else (received,), strict=True
                ):
                    values[microbatch] = value

    def _then_reduce(self, run: Run, complete: frozenset[int] | None) -> Run:
        def run_and_reduce(frame: Frame) -> None:
            run(frame)
            self.replicas.reduce(complete)

        return run if complete is None else run_and_reduce

    @cached_property
    def _complete(self) -> dict[int, frozenset[int]]:
        """By index in the row, the ids of the weights whose gradients can be reduced after it."""
        if self.replicas.group is None:
            return {}
        row, reduced = self.program.rows[self.device], self.sharded.reduced
        own = [weights - self.tied.tied for weights in self.sharded.weights]
        return completed(row, [frozenset() if stage in reduced else weights for stage, weights in enumerate(own)])

    def _exchanged(self, loss: frozenset[int]) -> str:
        """Return a digest of the messages that copies exchange in a step, apart from the program, if the loss uses these weights."""
        if self.replicas.group is None:
            return ""
        if self._order is None or self._order[0] != loss:
            weights = [cell.parameters for cell in self.cells]
            self._order = loss, exchange_order(weights, self.norms.norms, loss, self.replicas.weights.named())
        return self._order[1]

    @cached_property
    def sharded(self) -> ShardedRow:
        """The sharded parameters of the row, and when it gathers, frees and reduces them."""
        weights = [cell.parameters for cell in self.cells]
        return ShardedRow(self.replicas, self.program.rows[self.device], weights, self.tied.tied, self._names)

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.graph.named_parameters()}

    @cached_property
    def _summary(self) -> str:
        return summary(self.program)

    @cached_property
    def _departures(self) -> tuple[Departure, ...]:
        return departures(self.program)

    @cached_property
    def _incoming(self) -> dict[int, tuple[str, ...]]:
        return incoming(self.program, self.device)
