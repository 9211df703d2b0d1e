"""The floor under the recorder: calls that reach the dispatcher without torch having shown them to a TorchFunctionMode.

    torch.Tensor(4), torch.from_numpy(a)        made in C++
    vmap(f)(x), torch.func.grad(f)(x)           f computes on wrapped tensors; what arrives here are plain ones

They are written down as the operators that they are (`aten.mm`, ...), which autograd differentiates like any other call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from pipecompile.errors import TraceError
from pipecompile.torch_private.modes import TorchDispatchMode, is_transformed_tensor, transform_stack
from pipecompile.torch_private.operators import HigherOrderOperator, name_of, schema_of
from pipecompile.tracing.user_source import caller

__all__ = ["Floor", "transformed"]

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift.default)
"""How autograd wraps a tensor that it hands on: the same value, gradient and all."""

_REWRITTEN = {torch.ops.aten.lift_fresh.default: torch.ops.aten.lift_fresh_copy.default}
"""Memory from outside torch: every run of the graph starts from a copy of its own."""


class Listener(Protocol):
    @property
    def listening(self) -> bool: ...

    def dispatched(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any: ...

    def same(self, value: torch.Tensor, alias: torch.Tensor) -> None: ...


class Floor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands above the FakeTensorMode. `detaching` while the user detaches: then a detach is no mere wrapping."""

    supports_higher_order_operators = True

    def __init__(self, listener: Listener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener = listener
        self.detaching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise TraceError(
                code="PC115", where=caller(), why=f"torch compiles what {name_of(func)} is given as a whole"
            )
        if not self.listener.listening:
            return func(*args, **kwargs)
        if func in _ALIASES and not self.detaching:
            made = func(*args, **kwargs)
            self.listener.same(args[0], made)
            return made
        return self.listener.dispatched(_written(func), args, kwargs, _written_by(func, args, kwargs))


def _written(func: Any) -> Any:
    """The operator as the graph has it: one that autograd knows."""
    return getattr(func, "impl_aten", None) or _REWRITTEN.get(func, func)


def transformed(tensors: Iterable[torch.Tensor]) -> bool:
    """Is this the inside of a function that torch.func transforms, or are these tensors that come from there?"""
    return transform_stack() is not None or any(map(is_transformed_tensor, tensors))


def _written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes in place, by its schema."""
    named = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)) | kwargs
    found = [named.get(a.name) for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
