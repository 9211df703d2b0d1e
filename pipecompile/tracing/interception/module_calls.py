"""What never reaches a TorchFunctionMode, and is therefore intercepted where it is defined, while a model is recorded.

Module.__call__         leaf modules stay whole, and it is known which module is running
Function.apply          one call, so that a custom backward stays what it is
a scripted function     one call: nobody can look into TorchScript
len(x), isinstance ...  see python_questions.py
manual_seed and kin     change what is drawn after them
backward()              leaves gradients behind, where no recording finds them
is_grad_enabled()       the answer decides what is recorded
torch.compile           runs what it was given, uncompiled
nn.Transformer          looks at the values of a mask, only to find out whether a faster kernel may skip it: no
torch.distributions     look at the values of their parameters, only to refuse bad ones: not while recording

Everything is put back when the recording ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from pipecompile.torch_private.interception_points import (
    CAUSAL_MASK,
    NESTED_MASK,
    SCRIPT_CALL,
    VALIDATE_ARGUMENTS,
    scripted_source,
)
from pipecompile.tracing.interception.python_builtins import QUESTIONS
from pipecompile.tracing.interception.randomness import SETTERS
from pipecompile.tracing.state.recording_leftovers import Remains
from pipecompile.tracing.user_source import is_foreign

__all__ = ["Listener", "intercepted"]


class Listener(Protocol):
    """Is told about the calls; `listening` says whether it wants to be, on this thread and at this moment. `remains` knows
    what the model keeps.
    """

    remains: Remains

    @property
    def listening(self) -> bool: ...

    def module(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any: ...

    def opaque(self, shown: Callable[..., Any], written: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def seeds(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def asks_grad_mode(self) -> None: ...

    def reads_gradient(self) -> None: ...


@contextmanager
def intercepted(listener: Listener) -> Iterator[None]:
    """Route the calls through `listener` for as long as the block lasts; calls of other threads pass straight on."""
    found = [(owner, name, owner.__dict__.get(name, _ABSENT), new) for owner, name, new in (*_INTERCEPTED, *QUESTIONS)]
    replaced = [(owner, name, theirs, new(listener, theirs)) for owner, name, theirs, new in found]
    with torch.compiler.set_stance("force_eager"):
        try:
            for owner, name, _, ours in replaced:
                setattr(owner, name, ours)
            yield
        finally:
            for owner, name, theirs, _ in replaced:
                delattr(owner, name) if theirs is _ABSENT else setattr(owner, name, theirs)


_ABSENT: Any = object()


def _module(listener: Listener, original: Any) -> Any:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if listener.listening:
            return listener.module(original, module, args, kwargs)
        return original(module, *args, **kwargs)

    return call


def _function(listener: Listener, original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not listener.listening:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # the same numbers as without, and it can be cut inside
            function, _, *rest = args
            return function(*rest)
        return listener.opaque(original.__get__(None, cls), _applied(cls), args, kwargs)

    return classmethod(apply)


def _script(listener: Listener, original: Any) -> Any:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not listener.listening:
            return original(function, *args, **kwargs)
        return listener.opaque(scripted_source(function) or _scripted(function), _scripted(function), args, kwargs)

    return call


def _seeds(listener: Listener, original: Any) -> Any:
    def set_state(*args: Any, **kwargs: Any) -> Any:
        if listener.listening and sys._getframe(1).f_code.co_filename != torch.utils.checkpoint.__file__:
            return listener.seeds(original, args, kwargs)
        return original(*args, **kwargs)

    return set_state


def _grad_mode(listener: Listener, original: Any) -> Any:
    def enabled() -> bool:
        if listener.listening and not is_foreign(sys._getframe(1)):
            listener.asks_grad_mode()
        return bool(original())

    return enabled


def _backward(listener: Listener, original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if listener.listening:
            listener.reads_gradient()
        return original(*args, **kwargs)

    return backward


def _causal_mask(listener: Listener, original: Any) -> Any:
    return (
        lambda mask, is_causal=None, size=None: bool(is_causal)
        if listener.listening
        else original(mask, is_causal, size)
    )


def _no_nesting(listener: Listener, original: Any) -> Any:
    return lambda *args: False if listener.listening else original(*args)


def _unchecked(_listener: Listener, _original: Any) -> Any:
    return False


_INTERCEPTED: tuple[tuple[Any, str, Callable[[Listener, Any], Any]], ...] = (
    (nn.Module, "__call__", _module),
    (Function, "apply", _function),
    (*SCRIPT_CALL, _script),
    (torch, "is_grad_enabled", _grad_mode),
    (torch.autograd, "backward", _backward),
    *((owner, name, _seeds) for owner in (torch, torch.random) for name in SETTERS),
    (*CAUSAL_MASK, _causal_mask),
    (*NESTED_MASK, _no_nesting),
    (*VALIDATE_ARGUMENTS, _unchecked),
)


@cache
def _applied(cls: Any) -> Callable[..., Any]:
    """`cls.apply` as a function with a name, which is what fx wants to write down."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    return _named(apply, cls.__name__)


@cache
def _scripted(function: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return _named(run, function.name)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return function
