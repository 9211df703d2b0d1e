"""What went wrong while a model was recorded, in the words and at the line of its author."""

from __future__ import annotations

from types import FrameType

from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from pipecompile.tracing.user_source import frames, raiser

__all__ = ["is_unsupported_by_fakes", "as_trace_error", "eager_failure", "needs_values"]

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

_UNSUPPORTED = (
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_BRANCHES = ("__bool__", "is_nonzero", "equal", "allclose", "__contains__")
_LEAVES_TORCH = ("numpy", "__array__", "data_ptr", "__dlpack__", "__array_wrap__", "untyped_storage")


def needs_values(error: BaseException) -> bool:
    """Did Python ask for numbers, or torch for a number of rows, that no recording can know?"""
    return isinstance(error, _DATA_DEPENDENT)


def is_unsupported_by_fakes(error: BaseException) -> bool:
    """Is it not the model's fault, but a kernel's that does not run on tensors without memory, or with symbols for sizes?"""
    if isinstance(error, TraceError):
        return error.code == "PC115"
    return isinstance(error, _UNSUPPORTED) or (isinstance(error, RuntimeError) and "symbolic sizes" in str(error))


def as_trace_error(error: Exception, model: nn.Module) -> TraceError:
    """The TraceError for whatever the forward of `model` raised; one that is raised already is kept."""
    if isinstance(error, TraceError):
        return error
    called = _last_call(error)
    if needs_values(error):
        code = "PC103" if isinstance(error, DynamicOutputShapeException) else _by_call(called)
        return TraceError(code=code, where=raiser(error))
    if called in _LEAVES_TORCH:
        return TraceError(code="PC104", where=raiser(error))
    raised = f"{type(error).__name__}: {error}"
    return TraceError(f"cannot trace: the forward of {type(model).__name__} raised {raised}", where=raiser(error))


def eager_failure(error: Exception, model: nn.Module) -> TraceError:
    """The TraceError for what the forward of `model` raised by itself, with nobody recording."""
    what = f"cannot trace: the forward of {type(model).__name__} raised {type(error).__name__}: {error}"
    return TraceError(what, code="PC108", where=raiser(error))


def _by_call(called: str) -> str:
    return "PC101" if called in _BRANCHES or not called else "PC102"


def _last_call(error: BaseException) -> str:
    """The name of the call that reached the recorder last."""
    found = ""
    for frame, _ in frames(error):
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            found = _name(frame)
    return found


def _name(frame: FrameType) -> str:
    return str(getattr(frame.f_locals["func"], "__name__", ""))
