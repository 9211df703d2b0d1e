"""State that a function of the user's changes, such as a loss: restored after a call that is not the user's own.

loss_fn = lambda y, t: criterion(y, t)      criterion is a global, with buffers and counters of its own
loss_fn = criterion.forward                 a bound method
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from pipecompile.tracing.reachable_code import names_in, reachable
from pipecompile.tracing.state.snapshot import can_hold, contents_restored, places_of
from pipecompile.tracing.state.tensor_contents import tensors_restored

__all__ = ["function_restored"]


@contextmanager
def function_restored(function: Callable[..., Any], *, tensors: bool = True) -> Iterator[None]:
    """Restore, when the block ends, the containers, objects and globals that a function reaches, and the contents of their tensors.

    Without `tensors`, contents are left as they are: for a block that computes on fake tensors.
    """
    roots, functions = _reached(function)
    spaces = [
        (one.__globals__, name, one.__globals__[name])
        for one in functions
        for name in names_in(one.__code__) & one.__globals__.keys()
    ]
    with ExitStack() as stack:
        stack.enter_context(contents_restored(places_of(*roots)))
        if tensors:
            stack.enter_context(tensors_restored(*roots))
        try:
            yield
        finally:
            for space, name, value in spaces:
                if space.get(name) is not value:
                    space[name] = value


def _is_users(value: Any) -> bool:
    """Return whether a value may hold state of the user's; a pipeline keeps its own."""
    return can_hold(value) and type(value).__module__.partition(".")[0] != __name__.partition(".")[0]


class _Holder(nn.Module):
    """A module that has one value as an attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _reached(function: Any) -> tuple[list[Any], list[FunctionType]]:
    """Return the objects that a function and the functions it calls name or close over, itself included, and those functions."""
    roots: dict[int, Any] = {}
    functions: list[FunctionType] = []
    pending = [function]
    while pending:
        value = pending.pop()
        if id(value) in roots or not (value is function or _is_users(value)):
            continue
        roots[id(value)] = value
        code = reachable(value if isinstance(value, nn.Module) else _Holder(value))
        functions += code.functions
        pending += code.objects
    return list(roots.values()), functions
