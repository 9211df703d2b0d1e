"""Every exception that pipecompile raises on purpose: one root, one leaf per phase, and the codes of tracing failures.

    InputError: n_stages=0 is not a whole number of at least 1        what
      where  line or entry                                            optional
      why    the reason, if `what` does not say it                    optional
      try    n_stages=4                                               optional: text to paste

A `TraceError` has a code besides. A code never changes its meaning and is never reused; docs/errors.md has a section per code
with an example that raises it and a cure.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CODES",
    "DetachedLossError",
    "ErrorCode",
    "InfeasibleError",
    "InputError",
    "KeywordError",
    "MismatchError",
    "PartitionError",
    "PartitionWarning",
    "PipecompileError",
    "PlanError",
    "RecordingWarning",
    "RunError",
    "ScheduleError",
    "TraceError",
    "VerifyError",
    "described",
    "encodable",
    "text_of",
]


def encodable(text: str) -> str:
    r"""Return a text that can be written to any file, message or terminal: a lone surrogate becomes its escape, `\udc80`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """Return the text of an exception; a class of a user may have none, for its `__str__` raises."""
    try:
        return str(error)
    except Exception as fault:
        return f"(its text cannot be written: {type(fault).__name__})"


def described(error: BaseException) -> str:
    """Return the type of an exception and its text, if it has one."""
    return f"{type(error).__name__}: {text_of(error).partition(_REGISTRY)[0]}".removesuffix(": ")


_REGISTRY = " This could be because the operator doesn't exist for this backend"
"""Begin of the page of kernels in a message of torch's dispatcher about a missing one."""


_MOST = 4000
"""Characters of a line of a message. A file may have a word of any length, and the message quotes it."""


def _bounded(part: object) -> str:
    """Return a text that can be written anywhere, without the middle of lines that are longer than `_MOST` characters."""
    text = str(part)
    if len(text) > _MOST:
        text = "\n".join(map(_shortened, text.split("\n")))
    return encodable(text)


def _shortened(line: str) -> str:
    left_out = len(line) - _MOST
    return line if left_out <= 0 else f"{line[: _MOST // 2]} [{left_out:,} characters] {line[-_MOST // 2 :]}"


class PipecompileError(Exception):
    """Root of all errors of this library. `what` is a sentence; the other parts may be empty."""

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        what, where, why, hint = map(_bounded, (what, where, why, hint))
        self.what, self.where, self.why, self.hint = what, where, why, hint
        parts = (("where", where), ("why", why), ("try", hint))
        super().__init__("\n".join([what, *(f"  {label:<6} {text}" for label, text in parts if text)]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy or unpickle the error, with its text and its parts and without its traceback."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(cls: type[PipecompileError], args: tuple[Any, ...]) -> PipecompileError:
    return cls.__new__(cls, *args)


class InputError(PipecompileError):
    """An argument or a mini-batch that cannot be used: wrong types, shapes, batch sizes, devices or counts."""


class KeywordError(InputError, TypeError):
    """A call without a required argument, or with an unknown keyword. A TypeError, as Python raises."""


class DetachedLossError(InputError, RuntimeError):
    """A loss that has no gradient: it is detached, or nothing is to be trained. A RuntimeError, as `loss.backward()` raises."""


class TraceError(PipecompileError):
    """A model that cannot be recorded; `where` is the line of the user's file.

    `code` is an entry of CODES, which supplies the parts of the message that are not passed. `file`, `line`, `function` and
    `source` (the text of the line) are the parts of `where`; empty strings and line 0 when the line is unknown.
    """

    def __init__(self, what: str = "", *, code: str = "PC199", where: str = "", why: str = "", hint: str = "") -> None:
        entry = CODES[code]
        self.code, self.page = code, entry.page
        self.file, self.line, self.function, self.source = _source_line(where)
        if self.source and not where.endswith(self.source):
            where = f"{where}:  {self.source}"
        super().__init__(
            what or f"cannot trace: {entry.what}", where=where, why=why or entry.why, hint=hint or entry.hint
        )
        self.args = (f"{code} {self}\n  {'more':<6} {entry.page}",)


class MismatchError(PipecompileError):
    """A recording that does not compute what the model computes; `where` is the first node that differs."""


class PartitionError(PipecompileError):
    """A partition problem that is malformed or has no solution for its number of stages."""


class InfeasibleError(PartitionError):
    """A partition problem in which no cut fits; the message names the binding stage and the least limit that works."""


class PlanError(PipecompileError):
    """A plan file that is damaged, of another version, or of another graph."""


class ScheduleError(PipecompileError):
    """A schedule that is unknown, cannot be built for these counts, or has a text that does not parse."""


class VerifyError(PipecompileError):
    """Illegal data at one level. `faults` lists all faults, `picture` draws where they are. `file` is the file that a user named for
    it, if it is known.
    """

    file = ""

    def __init__(self, subject: str, faults: Sequence[str], picture: str = "") -> None:
        self.subject, self.faults = subject, tuple(faults)
        count = f"{len(self.faults)} fault" + "s" * (len(self.faults) != 1)
        picture_lines = [f"  {line}" for line in picture.splitlines()]
        fault_lines = [f"  - {fault}" for fault in self.faults]
        super().__init__("\n".join([f"{subject} is not legal: {count}", *fault_lines, *picture_lines]))


class RunError(PipecompileError):
    """A stage that failed while it ran, or a device that failed to move a value (`stage` None). The original exception is
    its `__cause__`.
    """

    def __init__(
        self, what: str, *, stage: int | None, microbatch: int, where: str = "", why: str = "", hint: str = ""
    ) -> None:
        self.stage, self.microbatch = stage, microbatch
        super().__init__(what, where=where, why=why, hint=hint)


class PartitionWarning(UserWarning):
    """Warning that the time limit ended before the cut was proven optimal, with the gap that remains; that stages have no operations; or that
    figures are of another cut.
    """


class RecordingWarning(UserWarning):
    """Warning that the model was recorded again, or that a mini-batch was divided otherwise than `n_microbatches` says, because
    of how the model is written.
    """


class LostCopyWarning(UserWarning):
    """Warning that a copy of the pipeline is lost, and that the others go on without it."""


_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+) in (?P<function>\S+?)(?::  (?P<source>.*))?$", re.DOTALL)


def _source_line(where: str) -> tuple[str, int, str, str]:
    """Return (file, line number, function, text of the line) of a place written as "file:line in function"."""
    match = _PLACE.match(where)
    if match is None:
        return "", 0, "", ""
    file, line = match["file"], int(match["line"])
    return file, line, match["function"], match["source"] or linecache.getline(file, line).strip()


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One kind of tracing failure: the parts of its message where the raising place passes none."""

    name: str
    what: str
    why: str
    hint: str

    @property
    def page(self) -> str:
        """Section of the documentation."""
        return f"docs/errors.md#{self.name.lower()}"


_TABLE = (
    ErrorCode("PC101", "Python branches on the value of a tensor",
              "an if, while or bool() needs a number that exists only when the model runs",
              "torch.where or a mask instead of the branch, or make it a statement or a submodule of its own, which is kept whole"),
    ErrorCode("PC102", "Python takes a number out of a tensor",
              "item(), tolist(), int() or float() needs a number that exists only when the model runs",
              "keep the number a tensor of no dimensions, which broadcasts, or use it in a statement or a submodule of its own, which is kept whole"),
    ErrorCode("PC103", "the shape of a result depends on the values of a tensor",
              "nonzero, unique, masked_select or a boolean index returns as many rows as the data decide",
              "multiply with the mask, topk, or make the call in a submodule, which is kept whole"),
    ErrorCode("PC104", "data leave torch",
              "numpy and other libraries compute on memory that a recording does not have",
              "the same computation in torch, or in a statement or a submodule of its own, which is kept whole"),
    ErrorCode("PC105", "the model returns an object that cannot be taken apart into tensors",
              "outputs are put together from micro-batches, leaf by leaf",
              "return tuples, lists or dicts of tensors"),
    ErrorCode("PC106", "a backward hook on the whole model",
              "no stage has the whole model's inputs and outputs", "register the hook on the submodules, or on the parameters"),
    ErrorCode("PC107", "a tensor was made by a call that torch does not report",
              "the tensor would be a constant of the recording; the call ran on another thread, or in code outside of torch",
              "make the call on the thread of the forward, or in a submodule, which is kept whole"),
    ErrorCode("PC108", "the forward itself raises on these inputs",
              "the forward raises without pipecompile, too", "call model(...) with the same arguments, and correct the model or the arguments until that runs"),
    ErrorCode("PC109", "the inputs cannot be used",
              "the model and its inputs are checked before anything is recorded", "an nn.Module, and the arguments of its forward"),
    ErrorCode("PC110", "the result of a submodule is unknown unless the submodule runs",
              "the submodule cannot be recorded, nor can it run: its weights or inputs are on meta",
              "give the model real weights and the example real data, or keep Python's decisions out of the submodule"),
    ErrorCode("PC111", "a submodule that cannot be recorded cannot be kept whole either",
              "its result could not be predicted: the result must be tensors, numbers and containers of them",
              "return tuples, lists or dicts of tensors, as many in every call"),
    ErrorCode("PC112", "a part kept whole returned another kind of result than while recording, or wrote another tensor",
              "Python code of the model has decided by the result of the recording",
              "compile with an example that is typical of the data; for lists of numbers that differ in every call, as of a decoder, return"
              " tensors, or call the model itself: pipe.model(x), on several ranks after pipe.model.load_state_dict(pipe.full_state_dict())"),
    ErrorCode("PC113", "the forward reads a gradient, or runs a backward that accumulates one",
              "gradients of earlier calls exist only when the model runs",
              "torch.autograd.grad(...) returns gradients and accumulates none; code that must read .grad belongs after the step"),
    ErrorCode("PC114", "a call depends on state that an earlier call left on the model",
              "one call is recorded, and the recording runs for every call",
              "keep the state in a buffer of one shape, or in a submodule, which is kept whole"),
    ErrorCode("PC115", "an operator that takes functions, such as flex_attention or torch.cond",
              "torch compiles the functions with the operator, so there are no single calls to record",
              "make the call in a statement or a submodule of its own, which is kept whole"),
    ErrorCode("PC116", "Python draws random numbers",
              "the numbers would be constants of the recording: the same in every step",
              "torch.rand and torch.where, or make the draw in a statement or a submodule of its own, which is kept whole"),
    ErrorCode("PC117", "tensors that autograd saves pass through hooks",
              "the hooks belong to this run of the forward, and a recording runs without it",
              "enter torch.autograd.graph.saved_tensors_hooks in a statement or a submodule of its own, which is kept whole; or around the step"),
    ErrorCode("PC199", "the forward works, but not while it is recorded",
              "a recording computes on tensors without memory; something in the model does not work on such tensors",
              "move it into a submodule of its own, which is kept whole; and please report the line"),
)  # fmt: skip

CODES: dict[str, ErrorCode] = {entry.name: entry for entry in _TABLE}
