"""Dicts, lists and objects among the arguments that a forward fills: a caller that passed them finds nothing in them, and is told.

model(tokens, cache)      cache["keys"] = keys
pipe(tokens, cache)       each micro-batch has a dict of its own: RecordingWarning
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from pipecompile.batching.batch_dims import parameters_of
from pipecompile.batching.containers import flatten_containers
from pipecompile.errors import RecordingWarning
from pipecompile.tracing.state.snapshot import can_hold, contents_restored, places_of
from pipecompile.tracing.user_source import warn

__all__ = ["arguments_watched", "objects_restored"]

_PLAIN = (bool, int, float, complex, str, bytes)


def arguments_watched(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Iterable[Any]
) -> tuple[AbstractContextManager[None], ...]:
    """Return the contexts of a forward on these arguments and their leaves, in which a RecordingWarning is given if it fills one."""
    return _filled_containers_noted(model, args, kwargs), _objects_noted(model, leaves)


@contextmanager
def _filled_containers_noted(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Warn of the arguments of a forward in the block whose containers, or objects with tensors, hold other items at its end."""
    given = {**dict(zip(parameters_of(model.forward), args, strict=False)), **kwargs}
    before = {name: flatten_containers(value) for name, value in given.items()}
    yield
    for name, (leaves, spec) in before.items():
        now, structure = flatten_containers(given[name])
        if structure != spec or not all(map(_is_same, now, leaves)):
            _warn(model, name)


def _is_same(new: Any, old: Any) -> bool:
    """Return whether an item is the very one of before, or a plain value that is equal to it."""
    return new is old or (type(new) is type(old) and isinstance(new, _PLAIN) and bool(new == old))


@contextmanager
def _objects_noted(model: nn.Module, leaves: Iterable[Any]) -> Iterator[None]:
    """Warn of objects without tensors among the arguments that the block changes; they get their attributes back."""
    objects = _objects(leaves)
    with contents_restored(places_of(*objects, deep=True)) as changed:
        yield
    if changed:
        _warn(model, f"an object ({', '.join(sorted({type(one).__name__ for one in objects}))})")


def objects_restored(leaves: Iterable[Any]) -> AbstractContextManager[list[Any]]:
    """Return a context at whose end the objects among the arguments have their attributes of before again."""
    return contents_restored(places_of(*_objects(leaves), deep=True))


def _objects(leaves: Iterable[Any]) -> list[Any]:
    return [leaf for leaf in leaves if can_hold(leaf) and not isinstance(leaf, nn.Module)]


def _warn(model: nn.Module, what: str) -> None:
    warn(
        f"{type(model).__name__}.forward changes {what}, an argument: a pipeline leaves it as it is. Try to return from forward what it"
        " puts there",
        RecordingWarning,
    )
