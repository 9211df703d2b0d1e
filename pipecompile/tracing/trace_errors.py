"""TraceErrors for what goes wrong while a model is recorded: a code, and the line of the model's author."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FrameType

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipecompile.errors import CODES, TraceError, described, text_of
from pipecompile.torch_private.modes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from pipecompile.tracing.fakes.data_sizes import DataSizeCompared
from pipecompile.tracing.user_source import frames, raiser

__all__ = [
    "GradientStateError",
    "as_trace_error",
    "beside_kept",
    "cause_of",
    "eager_failure",
    "is_unsupported_by_fakes",
    "needs_values",
    "through_kept",
]

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DataSizeCompared,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)

_UNSUPPORTED = (
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_BRANCHES = ("__bool__", "is_nonzero", "equal", "allclose", "__contains__")
"""Calls whose result Python branches on."""
_READS_MEMORY = ("numpy", "__array__", "data_ptr", "__dlpack__", "__array_wrap__", "untyped_storage")
"""Calls by which data leave torch."""


class GradientStateError(TraceError):
    """The forward reads `.grad` of a tensor that requires no gradient: state of the model, which a piece kept whole may read."""


def needs_values(error: BaseException) -> bool:
    """Return whether the error is about values that a recording does not have: a number, or a number of rows."""
    return isinstance(error, _DATA_DEPENDENT)


_MODEL_ITSELF = "or, to evaluate, the model itself: pipe.model(x), on several ranks after pipe.model.load_state_dict(pipe.full_state_dict())"
"""A way out in evaluation. On ranks the model has the trained weights of its own stages alone."""


def is_unsupported_by_fakes(error: BaseException) -> bool:
    """Return whether a torch operator does not run on fake tensors or with symbolic sizes."""
    if isinstance(error, TraceError):
        return error.code == "PC115"
    return isinstance(error, _UNSUPPORTED) or (isinstance(error, RuntimeError) and "symbolic sizes" in text_of(error))


def as_trace_error(error: Exception, model: nn.Module) -> TraceError:
    """Return the TraceError for an exception of the forward of `model`; a TraceError as it is."""
    if isinstance(error, TraceError):
        return error
    called = _last_call(error)
    if needs_values(error):
        code = "PC103" if isinstance(error, DynamicOutputShapeException) else _by_call(called)
        hint = "" if model.training else f"{CODES[code].hint}; {_MODEL_ITSELF}"
        return TraceError(code=code, where=raiser(error), hint=hint)
    if called in _READS_MEMORY:
        return TraceError(code="PC104", where=raiser(error))
    raised = described(error)
    return TraceError(f"cannot trace: the forward of {type(model).__name__} raised {raised}", where=raiser(error))


def cause_of(error: TraceError, caught: BaseException) -> BaseException | None:
    """Return what to raise `error` from after `caught`: an error that is its own cause sends a reader of causes round forever."""
    return error.__cause__ if error is caught else caught


def eager_failure(error: Exception, model: nn.Module) -> TraceError:
    """Return the TraceError for an exception that the forward of `model` raises even when it is not recorded."""
    what = f"cannot trace: the forward of {type(model).__name__} raised {described(error)}"
    where, why, hint = raiser(error), "", ""
    if isinstance(error, TypeError) and not where and "forward()" in text_of(error):
        why = f"the forward is forward{inspect.signature(model.forward)}"
        hint = "pass the arguments of the forward"
        if "missing" not in text_of(error):
            hint += "; the target of the loss is a keyword of step: pipe.step(x, target=y)"
    elif "'indices' to have one of the following scalar types" in text_of(error):
        why = "rows of an embedding are chosen by whole numbers"
        hint = "x.long(); on the command line a dtype after the shape: --input 2x128:int64"
    return TraceError(what, code="PC108", where=where, why=why, hint=hint)


def beside_kept(fault: TraceError, kept: Sequence[str]) -> TraceError:
    """Return `fault`; if its cause is unknown, with the pieces that are kept whole: what these leave on the model is not recorded."""
    if fault.code != "PC199" or not kept:
        return fault
    return TraceError(
        fault.what,
        where=fault.where,
        why=f"{', '.join(kept)}: kept whole, so what its Python leaves on the model is not there while the rest is recorded; or another "
        "line does not work on tensors without memory",
        hint="return from its forward what code around it reads; or move that code into a submodule of its own, which is kept whole",
    )


def through_kept(fault: TraceError, cause: BaseException, kept: Sequence[str]) -> TraceError:
    """Return `fault`; if a gradient was asked for and pieces are kept whole, that it goes through these: their results have no history."""
    text = text_of(cause) if isinstance(cause, RuntimeError) else ""
    if fault.code != "PC199" or not kept or not any(part in text for part in _WITHOUT_HISTORY):
        return fault
    return TraceError(
        "cannot trace: a gradient goes through a part that is kept whole",
        code="PC110",
        where=fault.where,
        why=f"{', '.join(kept)}: the gradients of what it returns are unknown unless it runs",
        hint="make the call of torch.autograd.grad, and what it differentiates, in a submodule of its own, which is kept whole",
    )


_WITHOUT_HISTORY = ("appears to not have been used in the graph", "does not require grad and does not have a grad_fn")
"""Parts of the messages of autograd about tensors that do not come from each other."""


def _by_call(called: str) -> str:
    return "PC101" if called in _BRANCHES or not called else "PC102"


def _last_call(error: BaseException) -> str:
    """Return the name of the last torch call that reached the recorder, or ""."""
    name = ""
    for frame, _ in frames(error):
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            name = _function_name(frame)
    return name


def _function_name(frame: FrameType) -> str:
    return str(getattr(frame.f_locals["func"], "__name__", ""))
