"""What the user sees when a stage fails while it runs: the stage, the micro-batch and the line of the model's file."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from types import TracebackType

from torch import fx

from pipecompile.errors import RunError
from pipecompile.ir import Instruction, Kind, Program
from pipecompile.runtime.dispatch import Failure
from pipecompile.tracing.node_facts import facts

__all__ = ["explained"]

_VERBS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.RECOMPUTE: "recomputation",
}


def explained(failure: Failure, program: Program, graph: fx.GraphModule) -> BaseException:
    """The error to raise for a failure, its cause the original. Ctrl-C and the like stay what they are."""
    error = failure.error
    if not isinstance(error, Exception):
        return error
    instruction = program.rows[failure.device][failure.index]
    who, stage, microbatch = _subject(instruction, failure.device)
    where = _user_line(error.__traceback__, {node.name: facts(node).source for node in graph.graph.nodes})
    what = f"{who} of micro-batch {microbatch}: {type(error).__name__}: {error}"
    result = RunError(
        what, stage=stage, microbatch=microbatch, where=where or f"device {failure.device}, {instruction}"
    )
    result.__cause__ = error
    return result


def _subject(instruction: Instruction, device: int) -> tuple[str, int | None, int]:
    """Who failed in what, the stage (None when the device was moving a value), and the micro-batch."""
    if instruction.action is not None:
        stage, doing = instruction.action.stage, _VERBS[instruction.action.kind]
        return f"stage {stage} failed in {doing}", stage, instruction.action.microbatch
    value = (*instruction.reads, *instruction.writes)[0].value
    return f"device {device} failed in {instruction.op.value} of {value.name}", None, value.microbatch


def _user_line(step: TracebackType | None, sources: Mapping[str, str]) -> str:
    """Generated stage code assigns each node to a variable of its name: the failing line names the node."""
    found = ""
    while step is not None:
        code = step.tb_frame.f_code
        text = linecache.getline(code.co_filename, step.tb_lineno)
        name = text.split("=")[0].split(":")[0].strip()
        if code.co_name == "forward" and name in sources:
            found = sources[name]
        step = step.tb_next
    return found
