"""Errors of a run: which instruction failed, and the RunError with stage, micro-batch and the line of the model's file."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import torch
from torch import fx

from pipecompile.errors import PipecompileError, RunError, described, text_of
from pipecompile.ir import Instruction, Kind, Program
from pipecompile.runtime.cells.loss_gradients import SEPARATE_GRAPHS
from pipecompile.runtime.cells.stage_call import LOSS_NOTE
from pipecompile.runtime.hooked_updates import ADVICE
from pipecompile.text.units import BYTES, written
from pipecompile.torch_private.interception_points import StopRecomputation
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.user_source import raiser

__all__ = ["InstructionFailure", "microbatch_of", "run_error"]


class InstructionFailure(Exception):
    """Instruction `index` of `device` raised `error`."""

    def __init__(self, device: int, index: int, error: BaseException) -> None:
        super().__init__(text_of(error))
        self.device, self.index, self.error = device, index, error


_PHASES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.RECOMPUTE: "recomputation",
    Kind.OFFLOAD: "copy to the host",
    Kind.RELOAD: "copy from the host",
    Kind.UNSHARD: "gathering of its parameters",
    Kind.RESHARD: "freeing of its parameters",
    Kind.REDUCE_GRAD: "reduction of its gradients",
}


Peaks = Callable[[], Sequence[float]]
"""Returns the predicted peak of each pipeline device, in bytes."""


def run_error(
    failure: InstructionFailure,
    program: Program,
    graph: fx.GraphModule,
    peaks: Peaks | None = None,
    stage_graph: fx.Graph | None = None,
    *,
    has_hooks: bool = False,
) -> BaseException:
    """Return the error to raise for a failure; its cause is the original. KeyboardInterrupt and the like, and what a checkpoint
    around the call raises, are returned as they are.

    An error for lack of memory names the peak that was predicted, from `peaks`. An error of a kernel in a backward names the line
    of the forward, from the graph of the stage. `has_hooks`: gradients of parameters have hooks.
    """
    error = failure.error
    if not isinstance(error, Exception) or isinstance(error, StopRecomputation):
        return error
    instruction = program.rows[failure.device][failure.index]
    subject, stage, microbatch = _subject(instruction, failure.device)
    where = _user_line(error.__traceback__, {node.name: facts(node).source for node in graph.graph.nodes})
    where = where or raiser(error) or ("" if stage_graph is None else _line_of_forward(error, stage_graph))
    raised, why, hint = _parts(error, failure.device, peaks)
    subject = subject.replace(f"stage {stage}", "the loss") if _loss_note(error) else subject
    what = f"{subject} of micro-batch {microbatch}: {raised}"
    if "modified by an inplace operation" in text_of(error):
        why, hint = ADVICE if has_hooks else (_IN_PLACE, _recomputed(program) + _COPY)
    if program.n_stages > 1 and "not have been used in the graph" in text_of(error):
        why, hint = SEPARATE_GRAPHS
    result = RunError(
        what,
        stage=stage,
        microbatch=microbatch,
        where=where or f"device {failure.device}, {instruction}",
        why=why,
        hint=hint,
    )
    result.__cause__ = error
    return result


_IN_PLACE = "the forward of a later micro-batch, or the model itself, has written in place what this backward needs"
_COPY = "n_microbatches=1; or use a copy in forward: x * self.buffer.clone()"


def _recomputed(program: Program) -> str:
    """Return the advice to recompute, if the program does not."""
    actions = (instruction.action for row in program.rows for instruction in row)
    is_recomputed = any(action is not None and action.kind is Kind.RECOMPUTE for action in actions)
    return "" if is_recomputed else 'checkpoint="always", by which each backward computes its own values again; or '


def _line_of_forward(error: Exception, stage_graph: fx.Graph) -> str:
    """Return the line whose backward failed. The search must never hide the error that it is about."""
    from pipecompile.runtime.failed_backward import forward_line

    with suppress(Exception):
        return forward_line(error, stage_graph)
    return ""


def _parts(error: Exception, device: int, peaks: Peaks | None) -> tuple[str, str, str]:
    """Return the parts of an error message: what, why, and what to try."""
    if isinstance(error, PipecompileError):
        return error.what, error.why, error.hint
    return described(error), *_advice(error, device, peaks)


def _advice(error: Exception, device: int, peaks: Peaks | None) -> tuple[str, str]:
    """Return why an error of a device may have come and what to try; two empty strings for an error of the model's own code."""
    if isinstance(error, torch.OutOfMemoryError):
        predicted = "" if peaks is None else f"; the predicted peak is {written(BYTES, peaks()[device])}"
        hint = (
            'more micro-batches (n_microbatches=), checkpoint="always", a schedule with a lower peak, or memory_limit='
        )
        return f"pipeline device {device} is out of memory{predicted}", hint
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in text_of(error):
        return (
            "a GPU reports an error after the launch: an earlier action of any stage on it may have caused this one",
            "CUDA_LAUNCH_BLOCKING=1 in the environment, for a step in which each launch waits",
        )
    note = _loss_note(error)
    hint = "loss_fn on tensors of these shapes and types, without the pipeline, until it runs"
    if note and "more than 1 value per channel" in text_of(error):
        hint = "fewer micro-batches (n_microbatches=): BatchNorm in the loss normalises over one micro-batch, and needs two samples"
    return note, hint if note else ""


def _loss_note(error: BaseException) -> str:
    """Return a description of the arguments of the loss; "" if the error does not come from a loss."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(LOSS_NOTE)), "")


def microbatch_of(failure: InstructionFailure, program: Program) -> int:
    """Return the micro-batch of the instruction that failed."""
    return _subject(program.rows[failure.device][failure.index], failure.device)[2]


def _subject(instruction: Instruction, device: int) -> tuple[str, int | None, int]:
    """Return a phrase for what failed, the stage (None if the device was moving a value), and the micro-batch."""
    if instruction.action is not None:
        stage, phase = instruction.action.stage, _PHASES[instruction.action.kind]
        return f"stage {stage} failed in {phase}", stage, instruction.action.microbatch
    value = (*instruction.reads, *instruction.writes)[0].value
    return f"device {device} failed in {instruction.op.value} of {value.name}", None, value.microbatch


def _user_line(step: TracebackType | None, sources: Mapping[str, str]) -> str:
    """Return the user's line of the innermost failing node, or "".

    Generated stage code assigns each node to a variable of the node's name, so a line of the traceback names the node.
    """
    line = ""
    while step is not None:
        code = step.tb_frame.f_code
        text = linecache.getline(code.co_filename, step.tb_lineno)
        name = text.split("=")[0].split(":")[0].strip()
        if code.co_name == "forward" and name in sources:
            line = sources[name]
        step = step.tb_next
    return line
