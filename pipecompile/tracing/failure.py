"""What went wrong while a model was recorded, in the words and at the line of its author."""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pipecompile.errors import TraceError
from pipecompile.tracing.source import raiser

__all__ = ["explained"]

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def explained(error: Exception, model: nn.Module) -> TraceError:
    """The TraceError for whatever the forward of `model` raised; one that is raised already is kept."""
    if isinstance(error, TraceError):
        return error
    if isinstance(error, _DATA_DEPENDENT):
        return TraceError(
            "cannot trace: Python needs the value of a tensor",
            where=raiser(error),
            why="the model decides in Python (if, while, int(), .item(), nonzero) on numbers that exist only when it runs",
            hint="torch.where or masks instead of the branch, or move the decision out of forward",
        )
    return TraceError(
        f"cannot trace: the forward of {type(model).__name__} raised {type(error).__name__}: {error}",
        where=raiser(error),
        why="forward is run once on the shapes and dtypes of example_args",
        hint="check that model(*example_args, **example_kwargs) works",
    )
