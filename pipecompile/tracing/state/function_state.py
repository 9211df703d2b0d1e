"""State that a user function changes, such as a loss: restored after a call that is not the user's own.

loss_fn = lambda y, t: criterion(y, t)      criterion is a global, with buffers and counters of its own
loss_fn = criterion.forward                 a bound method
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from pipecompile.errors import RecordingWarning
from pipecompile.tracing.container_items import size_of, values_in
from pipecompile.tracing.leaf_modules import is_leaf
from pipecompile.tracing.loaded_names import bound_attributes, bound_globals, names_in
from pipecompile.tracing.reachable_code import ReachableCode, reachable
from pipecompile.tracing.state.hidden_containers import identity
from pipecompile.tracing.state.leftover_state import hooks_of
from pipecompile.tracing.state.outer_bindings import OuterBinding, OuterBindings, OuterNames
from pipecompile.tracing.state.process_settings import ProcessSettings
from pipecompile.tracing.state.random_states import generator_sources, generators_among, random_states_restored
from pipecompile.tracing.state.replayed_iterators import iterators_replayed
from pipecompile.tracing.state.shared_objects import is_shared
from pipecompile.tracing.state.snapshot import (
    Place,
    can_hold,
    contents_restored,
    held_values,
    holds_hidden,
    places_of,
    tensors_of,
)
from pipecompile.tracing.state.tensor_contents import tensors_restored
from pipecompile.tracing.user_source import warn

__all__ = [
    "function_restored",
    "generators_near",
    "globals_restored",
    "functions_near",
    "names_near",
    "places_near",
    "reads_objects",
    "roots_near",
    "tensors_held",
    "tensors_near",
    "warn_of_outer_changes",
]


@contextmanager
def function_restored(function: Callable[..., Any] | None, *, tensors: bool = True) -> Iterator[list[Any]]:
    """Restore, when the block ends, the containers, objects, generators and globals near a function, and the contents of their tensors.
    After it, the list has what had changed.

    Without `tensors`, contents are left as they are: for a block that computes on fake tensors.
    """
    roots, code = _reached(function)
    scopes = [(one.__globals__, names_in(one.__code__)) for one in code.functions]
    places, changed = places_of(*roots, most=_MOST, deep=True), list[Any]()
    with ExitStack() as stack:
        advanced = stack.enter_context(iterators_replayed(places, scopes))
        spaces = [(space, name, space[name]) for space, names in scopes for name in names & space.keys()]
        values = (*roots, *code.objects, *held_values(places), *(value for _, _, value in spaces))
        bindings = OuterBindings(_names(roots, code))
        containers = stack.enter_context(contents_restored(places))
        states = stack.enter_context(random_states_restored(generator_sources(generators_among(values))))
        written = stack.enter_context(tensors_restored(*roots, most=_MOST)) if tensors else []
        try:
            yield changed
        finally:
            for binding in (*bindings.changed(), *(OuterBinding(*one) for one in spaces)):
                if binding.is_changed():
                    binding.restore()
                    changed.append(binding.name)
            changed += states.changed()
    changed += [*containers, *written, *advanced]


def names_near(holder: Any) -> OuterNames:
    """Return the names outside of a module or a function that its code binds."""
    if not isinstance(holder, nn.Module):
        return _names(*_reached(holder))
    code = reachable(holder)
    return code.once("names near", lambda: OuterNames(code, holder.modules()))


def _names(roots: Sequence[Any], code: ReachableCode) -> OuterNames:
    """Return the names that code binds outside of objects, and of the modules inside those that are modules."""
    return OuterNames(
        code, [part for one in roots for part in (one.modules() if isinstance(one, nn.Module) else (one,))]
    )


def generators_near(function: Callable[..., Any] | None) -> list[Any]:
    """Return the generators of random numbers that a function names or closes over, and those that the objects near it hold."""
    roots, code = _reached(function)
    held = held_values(places_of(*roots, most=_MOST, deep=True))
    return generators_among([*code.objects, *_bound_to(function), *held])


def _is_users(value: Any) -> bool:
    """Return whether a value may hold state of the user's; a pipeline keeps its own."""
    is_own = type(value).__module__.partition(".")[0] == __name__.partition(".")[0]
    return (can_hold(value) or holds_hidden(value)) and not is_own


def tensors_near(function: Callable[..., Any] | None) -> dict[int, torch.Tensor]:
    """Return the tensors in the objects near a function by id, as far as `function_restored` restores them."""
    return {} if function is None else {id(tensor): tensor for tensor in tensors_of(*_reached(function)[0], most=_MOST)}


def functions_near(function: Callable[..., Any] | None) -> list[FunctionType]:
    """Return the functions that a function names or closes over, and those of the objects near it."""
    return [] if function is None else list(_reached(function)[1].functions)


def reads_objects(function: Callable[..., Any] | None) -> bool:
    """Return whether a function names, closes over, is or is a method of containers or user objects, such as a model."""
    if function is None:
        return False
    others = [one for one in _reached(function)[0] if not isinstance(one, _FUNCTIONS)]
    others += [part for part in _bound_to(function) if _is_users(part)]
    return any(map(_may_be_left_on, others))


def _may_be_left_on(value: Any) -> bool:
    """Return whether a forward may leave something on a value: of torch's own, on layers and containers of layers."""
    is_layer = isinstance(value, nn.Module) and any(True for _ in (*value.children(), *value.parameters()))
    return is_layer or type(value).__module__.partition(".")[0] != "torch"


def _bound_to(function: Any) -> tuple[Any, ...]:
    """Return the object of a method, or what a partial binds."""
    if isinstance(function, partial):
        return (*function.args, *function.keywords.values(), *_bound_to(function.func))
    return (function.__self__,) if isinstance(function, MethodType) else ()


@contextmanager
def globals_restored(model: nn.Module, *, tensors: bool = True) -> Iterator[list[str]]:
    """Restore, when the block ends, modules, tensors, containers and objects that the functions of a model name as globals or close over.

    The names themselves are bound as before, and context variables and settings of the process set as before. Without `tensors`, contents
    are left as they are: for a block that computes on fake tensors. After the block, the list has the names of what had changed and is not part of the model.
    """
    code, roots, names = reachable(model), roots_near(model), list[str]()
    if not _is_users(model):  # the call of a loss is a model of the recorder's: `function_restored` is around it
        yield names
        return
    alone = [one for one in code.objects if isinstance(one, torch.Tensor)]
    places, bindings = places_of(*roots, most=_MOST, deep=True), OuterBindings(names_near(model))
    settings = ProcessSettings()
    with ExitStack() as stack:
        containers = stack.enter_context(contents_restored(places))
        if tensors:
            stack.enter_context(tensors_restored(*roots, *alone, most=_MOST, places=places))
        try:
            yield names
        finally:
            for binding in bindings.changed():
                binding.restore()
                names.append(binding.name)
            names += settings.restore()
    if names or containers:
        own, bound_by_hooks = _changed_by_leaves(model)
        changed = [one for one in containers if identity(one) not in own]
        names[:] = [*sorted({*names} - bound_by_hooks), *([_globals_of(changed, code.functions)] if changed else [])]


def _changed_by_leaves(model: nn.Module) -> tuple[set[int], set[str]]:
    """Return the identities of the model's containers and of those near the hooks of its leaf modules, and names that such hooks bind: a
    node that calls a leaf module runs its hooks.
    """
    places, bound = places_of(model), set[str]()
    for hook in (hook for module in model.modules() if is_leaf(module) for hook in hooks_of(module)):
        roots, code = _reached(hook)
        places += places_of(*roots, most=_MOST, deep=True)
        bound.update(*(bound_attributes(one.__code__) | bound_globals(one.__code__) for one in code.functions))
        bound |= {one.name for one in code.objects if isinstance(one, ContextVar)}
    return {identity(place.container) for place in places}, bound


def warn_of_outer_changes(model: nn.Module, names: Sequence[str]) -> None:
    """Warn that what a forward changes beside the model is lost."""
    if names:
        warn(
            f"{type(model).__name__}.forward changes {', '.join(names)}, which is not part of the model: a pipeline leaves it"
            " as it is. Try a buffer or an attribute of the model instead",
            RecordingWarning,
        )


def roots_near(holder: Any) -> list[Any]:
    """Return the objects near a module or a function that may be state: of a module, those that its functions name or close over."""
    if not isinstance(holder, nn.Module):
        return _reached(holder)[0]
    own, code = {id(module) for module in holder.modules()}, reachable(holder)
    candidates = code.once("candidates", lambda: list(filter(_can_be_state, code.objects)))
    return [one for one in candidates if _may_be_state(one) and id(one) not in own]


def places_near(holder: Any, roots: Sequence[Any]) -> list[Place]:
    """Return the containers of a module, if the holder is one, and of the objects near it, `roots`."""
    own = places_of(holder, deep=True) if isinstance(holder, nn.Module) else []
    return [*own, *places_of(*roots, most=_MOST, deep=True)]


def tensors_held(holder: Any, roots: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of a module, if the holder is one, and of the objects near it, `roots`."""
    return [*(tensors_of(holder) if isinstance(holder, nn.Module) else ()), *tensors_of(*roots, most=_MOST)]


def _globals_of(changed: Sequence[Any], functions: Sequence[FunctionType]) -> str:
    """Return the names of the globals that have changed, as far as they have names."""
    spaces = [(one.__globals__, name) for one in functions for name in names_in(one.__code__)]
    ids = {identity(one) for one in changed}
    names = {name for space, name in spaces if id(space.get(name)) in ids}
    return ", ".join(sorted(names)) or "an object"


_MOST = 1000
"""Items of a container that may be state, and containers that are searched, the nearest first. What is larger is a registry of a
library, or the data set behind a trainer.
"""


def _can_be_state(value: Any) -> bool:
    """Return whether `_may_be_state` may be true of a value, whatever it has inside."""
    return isinstance(value, (dict, list, set, deque, nn.Module)) or _is_users(value)


def _may_be_state(value: Any) -> bool:
    if isinstance(value, (dict, list, set, deque)):
        return size_of(value) <= _MOST and not any(isinstance(one, (type, str)) for one in values_in(value))
    is_object = not isinstance(value, (*_FUNCTIONS, tuple, frozenset))
    return isinstance(value, nn.Module) or (is_object and _is_users(value) and not is_shared(value))


_MOST_ROOTS = 100
"""Objects and functions around a loss that are searched, the nearest first: a call of a library leads to thousands."""


_MOST_INSIDE = 10
"""Containers of one object that are searched for functions."""

_FUNCTIONS = (FunctionType, MethodType, partial)


class _Holder(nn.Module):
    """A module that has one value as an attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _reached(function: Any) -> tuple[list[Any], ReachableCode]:
    """Return the objects that a function and the functions it calls name or close over, itself included, and all that is found. Objects
    that other threads may change are left out.
    """
    roots: dict[int, Any] = {}
    found = ReachableCode()
    pending = [function]
    while pending and len(roots) < _MOST_ROOTS:
        value = _user_model(pending.pop(0))
        if id(value) in roots or not (value is function or (_is_users(value) and not is_shared(value))):
            continue
        roots[id(value)] = value
        code = reachable(value if isinstance(value, nn.Module) else _Holder(value), most=_MOST_ROOTS)
        found.functions += code.functions
        found.objects += code.objects
        pending += [*code.objects, *_functions_in(value)]
    found.functions = list(dict.fromkeys(found.functions))  # each search has found those of all
    return list(roots.values()), found


def _functions_in(value: Any) -> list[Any]:
    """Return the functions that an object has in its attributes, and in containers there, as the terms of a loss."""
    if isinstance(value, (nn.Module, FunctionType)):
        return []
    return [one for one in held_values(places_of(value, most=_MOST_INSIDE)) if isinstance(one, _FUNCTIONS)]


def _user_model(value: Any) -> Any:
    """Return the user's model of a pipeline; any other value as it is."""
    is_own = isinstance(value, nn.Module) and not _is_users(value)
    return value.model if is_own and isinstance(getattr(value, "model", None), nn.Module) else value
