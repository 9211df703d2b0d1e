"""What never reaches a TorchFunctionMode, and is therefore intercepted where it is defined, while a model is recorded.

    Module.__call__         so that leaf modules stay whole and everybody knows which module is running
    Function.apply          so that a custom backward stays what it is
    a scripted function     its insides are TorchScript, which cannot be looked into
    hash(size)              a table or cache that is asked about a size makes the recording right for that size alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["Listener", "intercepted"]

_ScriptFunction: Any = torch._C.ScriptFunction


class Listener(Protocol):
    """Is told about the calls; `listening` says whether it wants to be, on this thread and at this moment."""

    @property
    def listening(self) -> bool: ...

    def module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def opaque(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


@contextmanager
def intercepted(listener: Listener) -> Iterator[None]:
    """Route the calls through `listener` for as long as the block lasts; calls of other threads pass straight on."""
    module_call, apply, script = nn.Module.__call__, Function.__dict__["apply"], _ScriptFunction.__call__
    size_hash = torch.SymInt.__hash__

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if listener.listening:
            return listener.module(module_call, module, args, kwargs)
        return module_call(module, *args, **kwargs)

    def call_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not listener.listening:
            return apply.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # the same numbers as without, and it can be cut inside
            function, _, *rest = args
            return function(*rest)
        return listener.opaque(_applied(cls), args, kwargs)

    def call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        if listener.listening:
            return listener.opaque(_scripted(function), args, kwargs)
        return script(function, *args, **kwargs)

    def hash_size(size: torch.SymInt) -> int:
        return hash(int(size)) if listener.listening else size_hash(size)

    replaced = (
        (nn.Module, "__call__", call_module, module_call),
        (Function, "apply", classmethod(call_function), apply),
        (_ScriptFunction, "__call__", call_script, script),
        (torch.SymInt, "__hash__", hash_size, size_hash),
    )
    try:
        for owner, name, new, _ in replaced:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, _, old in replaced:
            setattr(owner, name, old)


@cache
def _applied(cls: Any) -> Callable[..., Any]:
    """`cls.apply` as a function with a name, which is what fx wants to write down."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    return _named(apply, cls.__name__, cls.__module__)


@cache
def _scripted(function: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return _named(run, function.name, "torch.jit")


def _named(function: Callable[..., Any], name: str, module: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    return function
