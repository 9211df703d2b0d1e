"""State that a function of the user's changes, such as a loss: restored after a call that is not the user's own.

loss_fn = lambda y, t: criterion(y, t)      criterion is a global, with buffers and counters of its own
loss_fn = criterion.forward                 a bound method
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from pipecompile.errors import RecordingWarning
from pipecompile.tracing.container_items import size_of, values_in
from pipecompile.tracing.loaded_names import names_in
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.outer_bindings import OuterBindings
from pipecompile.tracing.state.random_states import generator_sources, generators_among, random_states_restored
from pipecompile.tracing.state.shared_objects import is_shared
from pipecompile.tracing.state.snapshot import (
    Place,
    can_hold,
    content_of,
    contents_restored,
    held_values,
    places_of,
    tensors_of,
)
from pipecompile.tracing.state.tensor_contents import tensors_restored
from pipecompile.tracing.user_source import warn

__all__ = [
    "function_restored",
    "generators_near",
    "globals_restored",
    "places_near",
    "reads_objects",
    "roots_near",
    "tensors_held",
    "tensors_near",
]


@contextmanager
def function_restored(function: Callable[..., Any] | None, *, tensors: bool = True) -> Iterator[None]:
    """Restore, when the block ends, the containers, objects and globals near a function, and the contents of their tensors.

    Without `tensors`, contents are left as they are: for a block that computes on fake tensors.
    """
    roots, functions, _ = _reached(function)
    spaces = [
        (one.__globals__, name, one.__globals__[name])
        for one in functions
        for name in names_in(one.__code__) & one.__globals__.keys()
    ]
    with ExitStack() as stack:
        stack.enter_context(contents_restored(places_of(*roots, most=_MOST, deep=True)))
        if tensors:
            stack.enter_context(tensors_restored(*roots, most=_MOST))
        stack.enter_context(random_states_restored(generator_sources(generators_near(function))))
        try:
            yield
        finally:
            for space, name, value in spaces:
                if space.get(name) is not value:
                    space[name] = value


def generators_near(function: Callable[..., Any] | None) -> list[Any]:
    """Return the generators of random numbers that a function names or closes over, and those that the objects near it hold."""
    roots, _, objects = _reached(function)
    return generators_among([*objects, *_bound_to(function), *held_values(places_of(*roots, most=_MOST, deep=True))])


def _is_users(value: Any) -> bool:
    """Return whether a value may hold state of the user's; a pipeline keeps its own."""
    return can_hold(value) and type(value).__module__.partition(".")[0] != __name__.partition(".")[0]


def tensors_near(function: Callable[..., Any] | None) -> set[int]:
    """Return the ids of the tensors in the objects near a function, as far as `function_restored` restores them."""
    return set() if function is None else {id(tensor) for tensor in tensors_of(*_reached(function)[0], most=_MOST)}


def reads_objects(function: Callable[..., Any] | None) -> bool:
    """Return whether a function names, closes over, is or is a method of containers or objects of the user's, such as a model."""
    if function is None:
        return False
    others = [one for one in _reached(function)[0] if not isinstance(one, (FunctionType, MethodType, partial))]
    others += [part for part in _bound_to(function) if _is_users(part)]
    return any(type(one).__module__.partition(".")[0] != "torch" for one in others)


def _bound_to(function: Any) -> tuple[Any, ...]:
    """Return the object of a method, or what a partial binds."""
    if isinstance(function, partial):
        return (*function.args, *function.keywords.values(), *_bound_to(function.func))
    return (function.__self__,) if isinstance(function, MethodType) else ()


@contextmanager
def globals_restored(model: nn.Module, *, tensors: bool = True) -> Iterator[None]:
    """Restore, when the block ends, modules, tensors, containers and objects that the functions of a model name as globals or close over.

    The names themselves are bound as before. Without `tensors`, contents are left as they are: for a block that records on fake
    tensors. What it changes is lost, with a warning.
    """
    code, roots = reachable(model), roots_near(model)
    alone = [one for one in code.objects if isinstance(one, torch.Tensor)]
    if not _is_users(model):  # the call of a loss is a model of the recorder's: `function_restored` is around it
        yield
        return
    places, bindings = places_of(*roots, most=_MOST), OuterBindings(model, code)
    before = [(place.container, content_of(place.container)) for place in places]
    names: list[str] = []
    with contents_restored(places), tensors_restored(*roots, alone, most=_MOST) if tensors else nullcontext():
        try:
            yield
        finally:
            for binding in bindings.changed():
                names.append(binding.name)
                binding.restore()
        changed = [] if tensors else [one for one, content in before if not _is_same(content_of(one), content)]
    if (changed or names) and not tensors:
        listed = ", ".join([*sorted({*names}), *([_names(changed, code.functions)] if changed else [])])
        warn(
            f"{type(model).__name__}.forward changes {listed}, which is no part of the model: a pipeline leaves it"
            " as it is. Try a buffer or an attribute of the model instead",
            RecordingWarning,
        )


def roots_near(holder: Any) -> list[Any]:
    """Return the objects near a module or a function that may be state: of a module, those that its functions name or close over."""
    if not isinstance(holder, nn.Module):
        return _reached(holder)[0]
    own = {id(module) for module in holder.modules()}
    return [one for one in reachable(holder).objects if _may_be_state(one) and id(one) not in own]


def places_near(holder: Any, roots: Sequence[Any]) -> list[Place]:
    """Return the containers of a module, if the holder is one, and of the objects near it, `roots`."""
    own = places_of(holder, deep=True) if isinstance(holder, nn.Module) else []
    return [*own, *places_of(*roots, most=_MOST, deep=True)]


def tensors_held(holder: Any, roots: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of a module, if the holder is one, and of the objects near it, `roots`."""
    return [*(tensors_of(holder) if isinstance(holder, nn.Module) else ()), *tensors_of(*roots, most=_MOST)]


def _is_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether two contents consist of identical objects, or pairs of those."""
    flat = [[part for one in content for part in (one if type(one) is tuple else (one,))] for content in (now, then)]
    return len(flat[0]) == len(flat[1]) and all(one is other for one, other in zip(*flat, strict=True))


def _names(changed: Sequence[Any], functions: Sequence[FunctionType]) -> str:
    """Return the names of the globals that have changed, as far as they have names."""
    spaces = [(one.__globals__, name) for one in functions for name in names_in(one.__code__)]
    ids = {id(one) for one in changed}
    names = {name for space, name in spaces if id(space.get(name)) in ids}
    return ", ".join(sorted(names)) or "an object"


_MOST = 1000
"""Items of a container that may be state, and containers that are searched, the nearest first. What is larger is a registry of a
library, or the data set behind a trainer.
"""


def _may_be_state(value: Any) -> bool:
    if isinstance(value, (dict, list, set, deque)):
        return size_of(value) <= _MOST and not any(isinstance(one, (type, str)) for one in values_in(value))
    is_object = can_hold(value) and not isinstance(value, (FunctionType, MethodType, partial, tuple))
    return isinstance(value, nn.Module) or (is_object and _is_users(value) and not is_shared(value))


_MOST_ROOTS = 100
"""Objects and functions around a loss that are searched, the nearest first: a call of a library leads to thousands."""


class _Holder(nn.Module):
    """A module that has one value as an attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _reached(function: Any) -> tuple[list[Any], list[FunctionType], list[Any]]:
    """Return the objects that a function and the functions it calls name or close over and that may be state, itself included, those
    functions, and all objects. Of state, objects that other threads may change are left out.
    """
    roots: dict[int, Any] = {}
    functions: list[FunctionType] = []
    objects: list[Any] = []
    pending = [function]
    while pending and len(roots) < _MOST_ROOTS:
        value = _user_model(pending.pop(0))
        if id(value) in roots or not (value is function or (_is_users(value) and not is_shared(value))):
            continue
        roots[id(value)] = value
        code = reachable(value if isinstance(value, nn.Module) else _Holder(value), most=_MOST_ROOTS)
        functions += code.functions
        pending += code.objects
        objects += code.objects
    return list(roots.values()), functions, objects


def _user_model(value: Any) -> Any:
    """Return the user's model of a pipeline; any other value as it is."""
    is_own = isinstance(value, nn.Module) and not _is_users(value)
    return value.model if is_own and isinstance(getattr(value, "model", None), nn.Module) else value
