"""Errors of a run: which instruction failed, and the RunError with stage, micro-batch and the line of the model's file."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from types import TracebackType

from torch import fx

from pipecompile.errors import RunError
from pipecompile.ir import Instruction, Kind, Program
from pipecompile.tracing.node_facts import facts

__all__ = ["InstructionFailure", "microbatch_of", "run_error"]


class InstructionFailure(Exception):
    """Instruction `index` of `device` raised `error`."""

    def __init__(self, device: int, index: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.device, self.index, self.error = device, index, error


_PHASES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.RECOMPUTE: "recomputation",
}


def run_error(failure: InstructionFailure, program: Program, graph: fx.GraphModule) -> BaseException:
    """Return the error to raise for a failure; its cause is the original. KeyboardInterrupt and the like are returned as they are."""
    error = failure.error
    if not isinstance(error, Exception):
        return error
    instruction = program.rows[failure.device][failure.index]
    subject, stage, microbatch = _subject(instruction, failure.device)
    where = _user_line(error.__traceback__, {node.name: facts(node).source for node in graph.graph.nodes})
    what = f"{subject} of micro-batch {microbatch}: {type(error).__name__}: {error}"
    result = RunError(
        what, stage=stage, microbatch=microbatch, where=where or f"device {failure.device}, {instruction}"
    )
    result.__cause__ = error
    return result


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
