"""Calls that reach the dispatcher without torch having shown them to a TorchFunctionMode.

    torch.Tensor(4), torch.from_numpy(a)        tensors made in C++
    vmap(f)(x), torch.func.grad(f)(x)           f computes on wrapped tensors; the dispatcher sees plain ones

They are recorded as the operators that they are (`aten.mm`, ...), which autograd differentiates like any other call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import ObservingMode, is_transformed_tensor, transform_stack
from pipecompile.torch_private.operators import HigherOrderOperator, name_of, written_tensors
from pipecompile.tracing.emit.value_nodes import storages
from pipecompile.tracing.fakes.kernel_dtypes import RULES, check_dtypes
from pipecompile.tracing.user_source import caller

__all__ = ["DispatchRecorder", "is_transformed"]

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift.default)
"""Operators by which autograd wraps a tensor: the result is the same value with the same gradient."""

_REWRITTEN = {torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default}
"""Operators on memory from outside torch: in the graph they copy, so that no run sees the writes of another."""


class DispatchListener(Protocol):
    """The recorder, as far as the dispatcher needs it."""

    @property
    def is_listening(self) -> bool:
        """Whether calls of this thread are recorded at this moment."""

    def record_operator(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Make the call and record it; it writes `written` in place."""

    def bind_alias(self, value: torch.Tensor, alias: torch.Tensor) -> None:
        """Let the node of `value` stand for `alias` as well."""


class DispatchRecorder(ObservingMode):  # type: ignore[no-untyped-call]
    """The mode above the FakeTensorMode. `is_detaching`: the user calls detach, so it is recorded and no mere wrapping. `written` are
    the tensors that operators of the present call write; None outside of calls.
    """

    def __init__(self, listener: DispatchListener) -> None:
        super().__init__()
        self.listener = listener
        self.is_detaching = False
        self.written: list[torch.Tensor] | None = None

    @contextmanager
    def writes_noted(self, tensors: Sequence[torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
        """Yield a list that has, after this context, what operators wrote, in the memory of `tensors` if they are given. Calls with lists
        of tensors (`torch._foreach_mul_`), and `weight.data.clamp_()` in the hook of a layer, show no new version.
        """
        outer, self.written = self.written, []
        found: list[torch.Tensor] = []
        try:
            yield found
            if self.written:
                keys = None if tensors is None else storages(tensors)
                found += [one for one in self.written if keys is None or not keys.isdisjoint(storages([one]))]
        finally:
            self.written = outer if outer is None else [*outer, *self.written]

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise TraceError(
                code="PC115", where=caller(), why=f"torch compiles the functions that {name_of(func)} takes as a whole"
            )
        if str(getattr(func, "overloadpacket", "")) in RULES and _is_unusual(func, args):
            check_dtypes(func, args)
        if not self.listener.is_listening:
            if self.written is not None:
                self.written += written_tensors(func, args, kwargs)
            return func(*args, **kwargs)
        if func in _ALIASES and not self.is_detaching:
            alias = func(*args, **kwargs)
            self.listener.bind_alias(args[0], alias)
            return alias
        return self.listener.record_operator(_graph_operator(func), args, kwargs, written_tensors(func, args, kwargs))


def _graph_operator(func: Any) -> Any:
    """Return the operator for the graph: one that autograd differentiates."""
    return getattr(func, "impl_aten", None) or _REWRITTEN.get(func, func)


def is_transformed(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a function that torch.func transforms is running, or one of the tensors is wrapped by a transform."""
    return transform_stack() is not None or any(map(is_transformed_tensor, tensors))


def _is_unusual(func: Any, args: Any) -> bool:
    """Return whether the tensors are of several dtypes, or of whole numbers, or among them are indices, which must be whole."""
    dtypes = {argument.dtype for argument in args if isinstance(argument, torch.Tensor)}
    takes_indices = func is torch.ops.aten.index_select.default
    return takes_indices or len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes)
