"""One rank's part of a bound program: the row of its device, with SEND and RECV bound to the communicator.

device 1   RECV v#0 from 0   1F0 ...   SEND w#0 to 2        rank 1   take v#0 of rank 0, run the cell, send w#0 to rank 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import fx

from pipecompile.distributed.blame import FailureReport, RankLost
from pipecompile.distributed.collectives import OWED
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel import Replicas
from pipecompile.distributed.gradient_ready import completed
from pipecompile.errors import ScheduleError
from pipecompile.ir import HOST, LOSS, Instruction, Op, Program
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.runtime.cells.deferred_batchnorm import Norms
from pipecompile.runtime.cells.forward_backward import Run
from pipecompile.runtime.dispatch import Crew, Failure, run_inline
from pipecompile.runtime.executable import Executable
from pipecompile.runtime.interpreter import Binder, Cell, Code
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import explained
from pipecompile.runtime.streams import DeviceStreams
from pipecompile.torch_private.devices import to_device
from pipecompile.tracing.ambient_modes import contained

__all__ = ["RankExecutable"]


class RankBinder(Binder):
    """Messages to and from other devices go by the communicator."""

    def __init__(
        self, program: Program, cells: Sequence[Cell], devices: Sequence[torch.device], communicator: Communicator
    ) -> None:
        super().__init__(program, cells, devices, DeviceStreams(devices), threaded=False)
        self.communicator = communicator

    def send(self, instruction: Instruction, device: int) -> Run:
        peer, communicator = instruction.peer, self.communicator
        if peer is None or peer == HOST:
            return super().send(instruction, device)
        (operand,) = instruction.reads
        index, name = self.register(operand, device), str(operand.value)

        def put(frame: Frame) -> None:
            communicator.send(peer, name, frame.registers[index])

        return put

    def receive(self, instruction: Instruction, device: int) -> Run:
        peer, communicator, here = instruction.peer, self.communicator, self.devices[device]
        if peer is None or peer == HOST:
            return super().receive(instruction, device)
        (operand,) = instruction.writes
        index, name = self.register(operand, device), str(operand.value)

        def take(frame: Frame) -> None:
            frame.registers[index] = _there(communicator.take(peer, name), here)

        return take


def _there(value: Any, device: torch.device) -> Any:
    """On the device, a leaf as it came."""
    if not isinstance(value, torch.Tensor) or value.device == device:
        return value
    return to_device(value.detach(), device).requires_grad_(value.requires_grad)


class RankExecutable(Executable):
    """A program of which this rank runs one row. What departs to the host reaches all ranks, but gradients of inputs. With copies
    of the pipeline, gradients are put together as the row completes them, but not those of `tied` weights, to which other
    ranks add.
    """

    def __init__(
        self,
        program: Program,
        cells: Sequence[Cell],
        devices: Sequence[torch.device],
        graph: fx.GraphModule,
        mirrors: Mirrors,
        norms: Norms | None = None,
        *,
        communicator: Communicator,
        placement: tuple[int, ...],
        replicas: Replicas,
        tied: frozenset[int],
    ) -> None:
        if program.placement != placement:
            raise ScheduleError(
                f"the schedule puts stages on ranks {program.placement}",
                why=f"the plan has them on {placement}, and their parameters are there",
                hint="compile with this schedule",
            )
        super().__init__(program, cells, devices, graph, mirrors, norms)
        self.communicator, self.device, self._is_agreed = communicator, communicator.ranks.index, False
        self.replicas, self.tied = replicas, tied

    @cached_property
    def inline(self) -> Code:
        binder = RankBinder(self.program, self.cells, self.devices, self.communicator)
        row = tuple(
            self._then_reduce(binder.run(instruction, self.device), self._complete.get(index))
            for index, instruction in enumerate(self.program.rows[self.device])
        )
        order = tuple((self.device, index) for index in range(len(row)))
        return Code(self.program, (row,), order, row, len(binder.registers), 0, threaded=False)

    def frame(self, sizes: tuple[int, ...], arrivals: dict[tuple[str, bool], Any], *, threaded: bool = False) -> Frame:
        """As in one process; before its first run the ranks agree that it is the same program everywhere."""
        if not self._is_agreed:
            self.communicator.agree("program of the step", self._summary)
            self.communicator.connect()
            self._is_agreed = True
        with self._blaming(is_begun=False):
            self.replicas.agree(self._summary)
            return super().frame(sizes, arrivals, threaded=threaded)

    def run(self, code: Code, frame: Frame, crew: Crew | None = None) -> None:
        """Run the row, then let all ranks have what departed. Raises RunError for a failure here, RankLost for one elsewhere."""
        assert crew is None
        error: BaseException | None = None
        with self._blaming():
            try:
                with contained():
                    for source, names in self._incoming.items():
                        self.communicator.expect(source, names)
                    run_inline(code, frame)
                    self._share(frame)
            except Failure as failure:
                error = self._explained(failure)
            if error is not None:
                raise error
            self.communicator.flush()

    def finished(self, frame: Frame, *, threaded: bool = False) -> None:
        with self._blaming():
            super().finished(frame, threaded=threaded)
            self.communicator.flush()

    @contextmanager
    def _blaming(self, *, is_begun: bool = True) -> Iterator[None]:
        """Say of a rank that is lost what it was about to do: its first action, when the run has not begun."""
        try:
            yield
        except RankLost as lost:
            raise lost if lost.is_told else RankLost(self._blamed(lost.report, is_begun), is_told=False) from None

    def _explained(self, failure: Failure) -> BaseException:
        instruction = self.program.rows[failure.device][failure.index]
        if not isinstance(failure.error, RankLost):
            self.communicator.action = f"at {instruction.action or instruction}"
            return explained(failure, self.program, self.graph)
        return failure.error

    def _blamed(self, report: FailureReport, is_begun: bool) -> FailureReport:
        """With the first action of the rank whose result somebody waits for; its last one, if that is nothing of its row. A rank of
        another copy is not in this program.
        """
        wanted = {name.partition(" ")[0] for name in self.communicator.wanted(report.rank, report.where)}
        row = next(
            (row for d, row in enumerate(self.program.rows) if self.communicator.ranks.rank_of(d) == report.rank), ()
        )
        first = maker = None
        for instruction in row:
            maker = instruction.action or maker
            first = first or maker
            if instruction.op is Op.SEND and str(instruction.reads[0].value) in wanted and maker is not None:
                break
        else:
            maker = maker if is_begun else first
        if maker is None:
            return replace(report, action=report.action or f"before {OWED} had come")
        return replace(report, action=f"before {maker} had come", stage=maker.stage, microbatch=maker.microbatch)

    def _share(self, frame: Frame) -> None:
        for device, name, microbatch in self._departures:
            mark, found = _departing(name, microbatch), frame.departures[name, False]
            if device == self.device:
                value = found[microbatch] if microbatch is not None else torch.stack(found).detach().cpu()
                for peer in self._others:
                    self.communicator.send(peer, mark, value)
            elif microbatch is None:
                found[:] = _there(self.communicator.take(device, mark), self.devices[self.device]).unbind()
            else:
                found[microbatch] = _there(self.communicator.take(device, mark), self.devices[self.device])

    def _then_reduce(self, run: Run, complete: frozenset[int] | None) -> Run:
        def run_and_reduce(frame: Frame) -> None:
            run(frame)
            self.replicas.reduce(complete)

        return run if complete is None else run_and_reduce

    @cached_property
    def _complete(self) -> dict[int, frozenset[int]]:
        """The weights of which the gradients can be put together, by place in the row."""
        if self.replicas.group is None:
            return {}
        return completed(self.program.rows[self.device], [cell.weights - self.tied for cell in self.cells])

    @cached_property
    def _summary(self) -> str:
        """What the ranks must have in common; sizes of values are not, for copies of a pipeline may have unequal batches."""
        program = self.program
        lines = [f"{device} {instruction}" for device, row in enumerate(program.rows) for instruction in row]
        mark = sha256("\n".join(lines).encode()).hexdigest()[:12]
        return f"{program.n_stages} stages, {program.n_microbatches} micro-batches, {len(lines)} instructions ({mark})"

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(self.program.n_devices) if peer != self.device]

    @cached_property
    def _departures(self) -> tuple[tuple[int, str, int | None], ...]:
        """Which device lets which value go to the host, gradients left out; losses go all in one message, so they have no number."""
        values = [
            (device, instruction.reads[0].value)
            for device, row in enumerate(self.program.rows)
            for instruction in row
            if instruction.op is Op.SEND and instruction.peer == HOST
        ]
        left = ((d, value.name, value.microbatch) for d, value in values if value.consumer is None)
        return tuple(dict.fromkeys((d, name, None if name == LOSS else m) for d, name, m in left))

    @cached_property
    def _incoming(self) -> dict[int, tuple[str, ...]]:
        """What comes from each peer in a run, in order."""
        row, found = self.program.rows[self.device], defaultdict[int, list[str]](list)
        for instruction in row:
            if instruction.op is Op.RECV and instruction.peer is not None and instruction.peer != HOST:
                found[instruction.peer].append(str(instruction.writes[0].value))
        for device, name, microbatch in self._departures:
            if device != self.device:
                found[device].append(_departing(name, microbatch))
        return {peer: tuple(names) for peer, names in found.items()}


def _departing(name: str, microbatch: int | None) -> str:
    return f"{name}{'' if microbatch is None else f'#{microbatch}'} for all"
