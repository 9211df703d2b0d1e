"""Calls that never reach a TorchFunctionMode, intercepted where they are defined while a model is recorded.

Module.__call__         leaf modules become one node each; other modules run, and the recorder knows which
Function.apply          one node, so that a custom backward stays as it is; also where `f = Square.apply` was bound before
checkpoint(...)         recorded through; the nodes of the call get a region, which is recomputed at run time
a scripted function     one node: TorchScript cannot be recorded through
len(x), isinstance ...  see `python_builtins`
manual_seed and others  nodes, because they change later draws
backward()              refused: it leaves gradients, which a recording cannot reproduce
saved_tensors_hooks     refused: the hooks of a run are in no recording
is_grad_enabled()       noted: the answer decides what is recorded
torch.compile           runs the original, uncompiled
nn.Transformer          reads the values of a mask, to choose a faster kernel: answered with no, and a warning where padding differs
torch.distributions     read the values of their parameters, only to refuse bad ones: not while recording

All originals are put back when the recording ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from pipecompile.errors import TraceError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.interception_points import (
    CAUSAL_MASK,
    NESTED_MASK,
    NODE_HOOK,
    REGION_GENERATORS,
    SCRIPT_CALL,
    VALIDATE_ARGUMENTS,
    scripted_source,
)
from pipecompile.tracing.ambient_modes import INFERENCE_MODE
from pipecompile.tracing.interception.changing_functions import refusing_changes
from pipecompile.tracing.interception.checkpoint_calls import (
    RegionListener,
    record_reentrant_region,
    record_region,
)
from pipecompile.tracing.interception.python_builtins import BUILTIN_PATCHES
from pipecompile.tracing.interception.randomness import RNG_FUNCTIONS
from pipecompile.tracing.interception.transformer_masks import causal_mask, no_nesting
from pipecompile.tracing.state.recording_leftovers import RecordingLeftovers
from pipecompile.tracing.user_source import called_by_user, caller, is_foreign

__all__ = ["CallListener", "intercepted"]


class CallListener(RegionListener, Protocol):
    """The recorder, as far as the patches need it. `leftovers` knows the model's containers."""

    leftovers: RecordingLeftovers
    is_grad_enabled: bool
    """Whether the model's Python has gradients on, whatever the mode inside a call is."""

    @property
    def is_listening(self) -> bool:
        """Whether calls of this thread are recorded at this moment."""

    def record_module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module: record one node, or record through it."""

    def record_single_call(
        self, shape_function: Callable[..., Any], target: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Record one node that calls `target`; `shape_function` computes its result on fake tensors."""

    def record_rng_call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a node that reads or sets the state of the random number generator."""

    def note_grad_mode_read(self) -> None:
        """Note that the model reads whether gradients are on."""

    def note_read(self, what: str) -> None:
        """Note that the model reads `INFERENCE_MODE`."""

    def refuse_saved_tensor_hooks(self) -> None:
        """Raise TraceError, because the model passes what autograd saves through hooks."""

    def refuse_gradient_read(self) -> None:
        """Raise TraceError, because the model reads `.grad` or runs a backward."""


@contextmanager
def intercepted(listener: CallListener) -> Iterator[None]:
    """Route the calls of this thread through `listener` inside the block."""
    originals = [
        (owner, name, owner.__dict__.get(name, _ABSENT), patch)
        for owner, name, patch in (*_INTERCEPTED, *BUILTIN_PATCHES, *_bound_functions(), *_checkpoints())
    ]
    replaced = [(owner, name, original, patch(listener, original)) for owner, name, original, patch in originals]
    with torch.compiler.set_stance("force_eager"):
        try:
            for owner, name, _, patched in replaced:
                setattr(owner, name, patched)
            yield
        finally:
            for owner, name, original, _ in replaced:
                delattr(owner, name) if original is _ABSENT else setattr(owner, name, original)


_ABSENT: Any = object()
"""The original of an attribute that its owner inherits."""


def _module(listener: CallListener, original: Any) -> Any:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if listener.is_listening:
            return listener.record_module_call(original, module, args, kwargs)
        return original(module, *args, **kwargs)

    return call


def _node_hook(listener: CallListener, original: Any) -> Any:
    def register(hooks: Any, hook: Any) -> Any:
        if listener.is_listening and called_by_user():
            raise TraceError(
                "cannot trace: a hook on a node of autograd",
                code="PC113",
                where=caller(),
                why="a stage begins a graph of its own, which may lack the node",
                hint="x.register_hook, which is recorded, instead of x.grad_fn.register_hook",
            )
        return original.__get__(None, object)(hooks, hook)

    return staticmethod(register)


def _function(listener: CallListener, original: Any) -> Any:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not listener.is_listening:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            return record_reentrant_region(listener, *args)
        function = refusing_changes(original.__get__(None, cls), cls)
        return listener.record_single_call(function, _applied(cls), args, kwargs)

    return classmethod(apply)


def _bound_functions() -> Iterator[tuple[Any, str, Callable[[CallListener, Any], Any]]]:
    """Yield the `forward` of every custom function, which `f = Square.apply` reaches without a lookup of `apply`."""
    pending = list(Function.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if not cls.__module__.startswith("torch."):
            yield cls, "forward", partial(_forward, cls, cls.forward)


def _checkpoints() -> Iterator[tuple[Any, str, Callable[[CallListener, Any], Any]]]:
    """Yield the generator functions of checkpoints without reentrant autograd."""
    for module, name in REGION_GENERATORS:
        owner = sys.modules.get(module)
        if hasattr(owner, name):
            yield owner, name, _region


def _region(listener: CallListener, original: Any) -> Any:
    def generator(*args: Any, **kwargs: Any) -> Any:
        return record_region(listener, original, args, kwargs) if listener.is_listening else original(*args, **kwargs)

    return generator


def _forward(cls: Any, forward: Callable[..., Any], listener: CallListener, _original: Any) -> Any:
    def run(*args: Any) -> Any:
        if not listener.is_listening:
            return forward(*args)
        context, inputs = (args[0], args[1:]) if cls.setup_context is Function.setup_context else (None, args)
        mode = listener.is_grad_enabled
        with torch.set_grad_enabled(mode):  # off inside `apply`
            result = listener.record_single_call(refusing_changes(cls.apply, cls), _applied(cls), inputs, {})
        listener.is_grad_enabled = mode
        if context is not None:
            _mark(context, result, inputs)
        return result

    run.replaced = forward  # type: ignore[attr-defined]
    return staticmethod(run)


def _mark(context: Any, result: Any, inputs: tuple[Any, ...]) -> None:
    """Mark results of the recorded call on the context of the call around it, which wraps them again."""
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    context.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.requires_grad))
    context.mark_dirty(*(tensor for tensor in tensors if any(tensor is given for given in inputs)))


def _script(listener: CallListener, original: Any) -> Any:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not listener.is_listening:
            return original(function, *args, **kwargs)
        return listener.record_single_call(
            scripted_source(function) or _scripted(function), _scripted(function), args, kwargs
        )

    return call


def _seeds(listener: CallListener, original: Any) -> Any:
    def set_state(*args: Any, **kwargs: Any) -> Any:
        if listener.is_listening and sys._getframe(1).f_code.co_filename != torch.utils.checkpoint.__file__:
            return listener.record_rng_call(original, args, kwargs)
        return original(*args, **kwargs)

    return set_state


def _grad_mode(listener: CallListener, original: Any) -> Any:
    def enabled() -> bool:
        if listener.is_listening and not is_foreign(sys._getframe(1)):
            listener.note_grad_mode_read()
        return bool(original())

    return enabled


def _inference_mode(listener: CallListener, original: Any) -> Any:
    def enabled() -> bool:
        if listener.is_listening and not is_foreign(sys._getframe(1)):
            listener.note_read(INFERENCE_MODE)
        return bool(original())

    return enabled


def _backward(listener: CallListener, original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        if listener.is_listening:
            listener.refuse_gradient_read()
        return original(*args, **kwargs)

    return backward


def _saved_tensor_hooks(listener: CallListener, original: Any) -> Any:
    def enter(hooks: Any) -> Any:
        if listener.is_listening and torch.is_grad_enabled():
            listener.refuse_saved_tensor_hooks()
        return original(hooks)

    return enter


def _no_validation(_listener: CallListener, _original: Any) -> Any:
    return False


_INTERCEPTED: tuple[tuple[Any, str, Callable[[CallListener, Any], Any]], ...] = (
    (nn.Module, "__call__", _module),
    (Function, "apply", _function),
    (*SCRIPT_CALL, _script),
    (torch, "is_grad_enabled", _grad_mode),
    (torch, "is_inference_mode_enabled", _inference_mode),
    (torch.autograd, "backward", _backward),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__", _saved_tensor_hooks),
    *((owner, name, _seeds) for owner in (torch, torch.random) for name in RNG_FUNCTIONS),
    (*CAUSAL_MASK, causal_mask),
    (*NESTED_MASK, no_nesting),
    (*NODE_HOOK, _node_hook),
    (*VALIDATE_ARGUMENTS, _no_validation),
)


@cache
def _applied(cls: Any) -> Callable[..., Any]:
    """Return `cls.apply` as a function with the name of the class, as fx needs for a node. Saved plans contain the name."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    apply.autograd_function = cls  # type: ignore[attr-defined]
    return _named(apply, cls.__name__)


@cache
def _scripted(function: Any) -> Callable[..., Any]:
    """Return a scripted function as a Python function of the same name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return _named(run, function.name)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    return function
