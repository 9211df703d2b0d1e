"""A lowered program bound to stages and devices: what `step` and `pipe(x)` run, made once per number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import torch
from torch import fx

from pipecompile.errors import InputError
from pipecompile.graph.stages import Stage
from pipecompile.ir import AUX, HOST, LOSS, TARGET, Kind, Op, Program, Route
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.runtime.cells.deferred_batchnorm import Norms
from pipecompile.runtime.cells.recompute import Footprints
from pipecompile.runtime.cells.stage_call import StageCode
from pipecompile.runtime.dispatch import Crew, Failure, run_inline
from pipecompile.runtime.interpreter import Cell, Code, bind
from pipecompile.runtime.model_output import Outputs, own_loss
from pipecompile.runtime.registers import Frame
from pipecompile.runtime.run_errors import explained
from pipecompile.torch_private import pytree
from pipecompile.tracing.ambient_modes import contained

__all__ = ["Executable", "loss_cells", "plain_cells"]

Function = Callable[..., Any]


def plain_cells(stages: Sequence[Stage], codes: Sequence[StageCode]) -> list[Cell]:
    """Each stage as it is."""
    return [
        Cell(code.run, stage.inputs, stage.outputs, stage.sized, Footprints.of(stage), code.look, _weights(stage))
        for stage, code in zip(stages, codes, strict=True)
    ]


def _weights(stage: Stage) -> frozenset[int]:
    return frozenset(map(id, stage.module.parameters()))


def loss_cells(
    stages: Sequence[Stage],
    codes: Sequence[StageCode],
    routes: Sequence[Route],
    outputs: Outputs,
    loss_fn: Function | None,
) -> list[Cell]:
    """Each stage as it is, the last one followed by the loss."""
    last = len(stages) - 1
    inputs = tuple(route.value for route in routes if last in route.consumers)
    *others, plain = plain_cells(stages, codes)
    written = tuple(inputs.index(plain.inputs[place]) for place in plain.prints.inputs)
    has_aux = any(route.value == AUX for route in routes)
    function = _with_loss(stages[-1], plain.function, inputs, outputs, _losses(loss_fn, has_aux=has_aux))
    named = (LOSS, AUX) if has_aux else (LOSS,)
    return [
        *others,
        Cell(function, inputs, named, True, replace(plain.prints, inputs=written), plain.look, plain.weights),
    ]


def _with_loss(stage: Stage, module: Function, inputs: tuple[str, ...], outputs: Outputs, losses: Function) -> Function:
    position = {name: i for i, name in enumerate(inputs)}
    taken = [position[name] for name in stage.inputs]
    target = position.get(TARGET)

    def function(*values: Any) -> tuple[Any, ...]:
        *given, size = values
        arguments = [given[i] for i in taken]
        made = dict(zip(stage.outputs, module(*arguments, size) if stage.sized else module(*arguments), strict=True))
        output = outputs.assemble(lambda name: made[name] if name in made else given[position[name]], size)
        found: tuple[Any, ...] = losses(output) if target is None else losses(output, given[target])
        return found

    return function


def _losses(loss_fn: Function | None, *, has_aux: bool) -> Function:
    """The loss as a tuple, with what comes beside it, which keeps no graph."""
    if not has_aux:
        loss_of = loss_fn or (lambda output, *_: own_loss(output))
        return lambda *given: (_scalar(loss_of(*given)),)
    assert loss_fn is not None

    def with_aux(*given: Any) -> tuple[Any, ...]:
        pair = loss_fn(*given)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"loss_fn gave a {type(pair).__name__}", hint="(loss, aux), as has_aux=True says")
        loss, aux = pair
        return _scalar(loss), pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, aux)

    return with_aux


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        hint = "loss_fn(output, target) must return the mean over its samples"
        if isinstance(loss, tuple):
            hint += "; compile(..., has_aux=True) if it returns (loss, aux)"
        raise InputError(f"the loss is {what}, not a scalar", hint=hint)
    return loss if loss.dim() == 0 else loss.reshape(())


class Executable:
    """One program, ready to run any number of times. Frames are kept for the next run; a failed one is thrown away."""

    def __init__(
        self,
        program: Program,
        cells: Sequence[Cell],
        devices: Sequence[torch.device],
        graph: fx.GraphModule,
        mirrors: Mirrors,
        norms: Norms | None = None,
    ) -> None:
        self.program, self.cells, self.devices, self.graph = program, cells, tuple(devices), graph
        self.mirrors, self.norms = mirrors, norms or Norms()
        self._idle: dict[bool, list[Frame]] = {False: [], True: []}

    @cached_property
    def inline(self) -> Code:
        return bind(self.program, self.cells, self.devices, threaded=False)

    @cached_property
    def threaded(self) -> Code:
        return bind(self.program, self.cells, self.devices, threaded=True)

    @cached_property
    def halves(self) -> tuple[Code, Code]:
        """The inline code up to the first backward of each device, and from there on."""
        code = self.inline
        cut = [_first_backward(row) for row in self.program.rows]
        walked = list(zip(code.order, code.flat, strict=True))
        ahead = [(place, run) for place, run in walked if place[1] < cut[place[0]]]
        after = [(place, run) for place, run in walked if place[1] >= cut[place[0]]]
        first, second = (
            replace(code, order=order, flat=flat)
            for order, flat in (zip(*ahead, strict=True), zip(*after, strict=True))
        )
        return first, second

    def frame(self, sizes: tuple[int, ...], arrivals: dict[tuple[str, bool], Any], *, threaded: bool = False) -> Frame:
        """A frame for one mini-batch whose micro-batches have these sizes. Mirrors show their homes from now on."""
        self.mirrors.refresh()
        self.norms.forget()
        for cell in self.cells:
            cell.look()
        code = self.threaded if threaded else self.inline
        idle = self._idle[threaded]
        boxes: list[Any] = [SimpleQueue() if threaded else None for _ in range(code.n_boxes)] if not idle else []
        frame = idle.pop() if idle else Frame([None] * code.n_registers, boxes)
        frame.sizes, frame.arrivals, frame.spans = sizes, arrivals, []
        frame.departures = {(n, back): [{} if back else None for _ in sizes] for n, back in self._departing}
        return frame

    def finished(self, frame: Frame, *, threaded: bool = False) -> None:
        """Take a frame back after a run that succeeded; what it left on mirrors goes home."""
        self.mirrors.settle()
        self.norms.settle()
        frame.arrivals, frame.departures, frame.events = {}, {}, {}
        self._idle[threaded].append(frame)

    @cached_property
    def _departing(self) -> tuple[tuple[str, bool], ...]:
        sent = [i.reads[0].value for row in self.program.rows for i in row if i.op is Op.SEND and i.peer == HOST]
        return tuple(dict.fromkeys((value.name, value.consumer is not None) for value in sent))

    def run(self, code: Code, frame: Frame, crew: Crew | None = None) -> None:
        """Run code on a frame, inline or with a crew. Raises RunError naming stage, micro-batch and the user's line."""
        try:
            with contained():
                run_inline(code, frame) if crew is None else crew.run(code, frame)
        except Failure as failure:
            error = explained(failure, self.program, self.graph)
        else:
            return
        raise error


def _first_backward(row: Sequence[Any]) -> int:
    """Where the backward half of a GPipe row begins: at its first backward, or at the first gradient received."""
    for index, instruction in enumerate(row):
        gradient = instruction.op is Op.RECV and instruction.writes[0].value.consumer is not None
        if gradient or (instruction.action is not None and instruction.action.kind is not Kind.FORWARD):
            return index
    return len(row)
