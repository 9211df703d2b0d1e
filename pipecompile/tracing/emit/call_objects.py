"""Containers and objects that a forward creates for functions of its backward: every micro-batch has its own.

    seen = []                                            objects = CallObjects
    k.register_hook(lambda g: seen.append(g))            first = remade(objects, <lambda>, [])     a lambda that appends to a new list
    h.register_hook(lambda g: g * seen[0] * scale)       second = remade(objects, <lambda>, [scale])     one that reads the same list

An object that the forward creates is a new one in each call. So the model is recorded a second time. Objects that the functions hold in
both recordings, the first of which stays alive, existed before the call: they are the user's own, one for all micro-batches.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from pipecompile.errors import RecordingWarning, TraceError
from pipecompile.text.shown_value import type_text
from pipecompile.tracing.emit.call_description import HeldArgument
from pipecompile.tracing.emit.made_objects import (
    Copies,
    assigned_in,
    empty_copy,
    is_of_call,
    is_state,
    parts_of,
    variables_of,
)
from pipecompile.tracing.reachable_code import is_foreign
from pipecompile.tracing.user_source import caller, warn

__all__ = ["CallObjects", "HeldObject", "KnownObjects", "UndecidedObjects", "remade", "with_objects"]


@dataclass(slots=True)
class KnownObjects:
    """Findings of earlier recordings of a model: the objects that functions held, by id, and the variables, by the code that reads
    them, that one function assigns and another reads, or whose tensor several functions hold.
    """

    objects: dict[int, Any] = field(default_factory=dict)
    variables: set[tuple[CodeType, str]] = field(default_factory=set)


class UndecidedObjects(TraceError):
    """Functions of a recording hold objects that each call may make. Another recording, with `known`, decides."""

    def __init__(self, known: KnownObjects) -> None:
        self.known = known
        super().__init__(code="PC114", why="functions hold objects; one more recording shows which the call makes")


@dataclass(slots=True)
class HeldObject:
    """A function or another object, the tensors and sizes of the call that it held when it was recorded, and the line of its call."""

    value: Any
    leaves: list[Any]
    where: str


class CallObjects:
    """The objects of one recording around the functions that it passes to calls. `known` is None in a first recording."""

    def __init__(self, known: KnownObjects | None) -> None:
        self.known, self.modules = known, frozenset[int]()
        self.noted: dict[int, HeldObject] = {}
        self._others: list[Any] = []
        self._passed: list[tuple[Any, str]] = []
        self._made: dict[int, Any] = {}
        self._assigned, self._joint = frozenset[int](), frozenset[int]()
        self._lock, self._alone = threading.RLock(), threading.local()

    def note_model(self, model: nn.Module) -> None:
        """Note the modules of the model, which are there before the call."""
        self.modules = frozenset(map(id, model.modules()))

    def leaves_around(self, function: Any) -> list[Any] | None:
        """Return the tensors and sizes of the call that a function holds, each once, if it has to be made anew in each call; else None."""
        made, leaves = self._around(function)
        is_plain = isinstance(function, FunctionType) and all(isinstance(one, _PLAIN) for one in made.values())
        has_state = self.known is not None and self._has_state(made)
        if has_state or (leaves and not is_plain and not self._has_state(made)):
            return leaves
        self._others.append(function)
        return None

    def _has_state(self, made: dict[int, Any]) -> bool:
        variables = self.known.variables if self.known else set()
        read = (
            (one.__code__, name) for one in made.values() if isinstance(one, FunctionType) for name in variables_of(one)
        )
        return any(map(is_state, made.values())) or any(assigned_in(made)) or not variables.isdisjoint(read)

    def note(self, function: Any, leaves: list[Any]) -> HeldObject:
        """Return the note of a function that is made anew in each call. Raise TraceError if it holds others than in an earlier note."""
        held = HeldObject(function, leaves, caller())
        first = self.noted.setdefault(id(function), held)
        if [*map(id, first.leaves)] != [*map(id, leaves)]:
            raise _changed(first.where)
        return held

    def kept(self, function: Any, args: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """Return what gives the arguments of the node of an autograd function, which is yet to be called with `args`, from these with fake
        tensors: an object without tensors is marked, since the backward may read or change that very object.

        Raise TraceError, there and here, if the class of the function, or its forward, hides from the graph what it reads or changes.
        """
        owner: Any = getattr(function, "autograd_function", None)
        self._require_free(owner)
        around = {place: self._around(arg) for place, arg in enumerate(args) if is_state(arg) and owner is not None}
        held = {place: made for place, (made, leaves) in around.items() if not leaves}
        self._passed += [(args[place], caller()) for place, (_, leaves) in around.items() if leaves]
        self._others += [args[place] for place in held]
        before = {place: [parts_of(one) for one in made.values()] for place, made in held.items()}

        def arguments(faked: Sequence[Any]) -> list[Any]:
            values = list(faked)
            for place, made in held.items():
                now = [parts_of(one) for one in made.values()]
                is_changed = any(not _is_same(one, other) for one, other in zip(now, before[place], strict=True))
                if is_changed and made and self.known is not None:
                    raise _refused(
                        _CHANGES.format(owner.__name__), caller(), "return it from the function, as a tensor"
                    )
                if not is_changed:
                    values[place] = HeldArgument(args[place])
            return values

        return arguments

    def _require_free(self, owner: Any) -> None:
        """Raise TraceError if an autograd function that the call defines reads objects or tensors of the call as variables."""
        for function in (getattr(owner, name, None) for name in ("forward", "backward", "setup_context")):
            if isinstance(function, FunctionType) and function.__closure__ and not is_foreign(function):
                made, leaves = self._around(function)
                self._others.append(function)
                if leaves or (self.known is not None and self._has_state(made)):
                    raise _refused(_HIDES.format(owner.__name__), caller(), "pass it to apply, for ctx")

    def check(self) -> None:
        """Raise UndecidedObjects if another recording has to show what the call makes, and TraceError if the forward has put a tensor into
        an object after a function with it was recorded. Note the objects as they are at the end of the forward.
        """
        around = [self._around(function) for function in (*(one.value for one in self.noted.values()), *self._others)]
        self._made = {key: value for made, _ in around for key, value in made.items()}
        held = Counter(id(leaf) for _, leaves in around for leaf in leaves if _may_be_written(leaf))
        self._assigned, self._joint = (
            frozenset(assigned_in(self._made)),
            frozenset(key for key in held if held[key] > 1),
        )
        self._require_decided()
        for value, where in self._passed:
            if id(value) in self._made:
                raise _refused(_SHARED, where, "pass the function a copy; or no tensor of the call in it")
        for one, (_, leaves) in zip(self.noted.values(), around, strict=False):
            if {*map(id, leaves)} - {*map(id, one.leaves)}:
                raise _changed(one.where)
        for value in [one for one in self._made.values() if is_state(one)]:
            self._require_copyable(value)
        self._others.clear()

    def _require_decided(self) -> None:
        """Raise UndecidedObjects if the recording was a first one and functions hold objects, or if variables are new to it."""
        known, functions = (
            self.known or KnownObjects(),
            [one for one in self._made.values() if isinstance(one, FunctionType)],
        )
        shared = {
            (one.__code__, name)
            for one in functions
            for name, cell in variables_of(one).items()
            if self._is_shared(cell)
        }
        is_first = self.known is None and any(map(is_state, self._made.values()))
        if is_first or not shared <= known.variables:
            objects = known.objects if self.known else dict(self._made)
            raise UndecidedObjects(KnownObjects(objects, known.variables | shared))

    def _is_shared(self, cell: CellType) -> bool:
        return id(cell) in self._assigned or any(id(content) in self._joint for content in parts_of(cell))

    def shared_by(self, held: HeldObject) -> set[int]:
        """Return the ids of the objects, variables and tensors around a function by which it may reach other functions of its call."""
        made, leaves = self._around(held.value)
        state = {key for key, one in made.items() if is_state(one) or key in self._assigned}
        return (state & self._made.keys()) | ({*map(id, leaves)} & self._joint)

    def are_in(self, values: Sequence[Any]) -> bool:
        """Return whether an object that each call makes anew is among values, or held by one."""
        return any(
            is_state(one) and key in self._made for value in values for key, one in self._around(value)[0].items()
        )

    def _around(self, function: Any) -> tuple[dict[int, Any], list[Any]]:
        """Return the objects around a function that the call made, by id, as far as is known, and the tensors and sizes of the call."""
        known = self.known.objects if self.known else {}
        made, leaves, pending = dict[int, Any](), dict[int, Any](), [function]
        while pending:
            value = pending.pop()
            if id(value) in made or id(value) in self.modules or id(value) in known:
                continue
            if is_of_call(value):
                leaves[id(value)] = value
                continue
            made[id(value)] = value
            pending += parts_of(value)
        return made, list(leaves.values())

    def _require_copyable(self, value: Any) -> None:
        """Let micro-batches share an object that cannot be copied, with a warning. Raise TraceError for a node of autograd."""
        where = next(one.where for one in self.noted.values())
        if isinstance(value, torch.autograd.graph.Node):
            raise TraceError(
                "cannot trace: a hook holds a node of autograd", code="PC113", where=where, why="it belongs to one call"
            )
        try:
            empty_copy(value)
        except Exception:  # whatever a user type raises
            del self._made[id(value)]
            name = f"the class {value.__name__}" if isinstance(value, type) else type_text(value)
            shared = f"hooks of all micro-batches share {name} that each call of the model makes ({where})"
            warn(f"{shared}: it cannot be copied", RecordingWarning)

    def remade(self, held: HeldObject, values: Sequence[Any]) -> Any:
        """Return a function made anew for the present micro-batch; `values` take the place of the tensors and sizes that it holds."""
        with self._lock:
            memo = self._memo_of(held)
            leaves = {id(leaf): value for leaf, value in zip(held.leaves, values, strict=True)}
            leaves |= {key: memo.setdefault(key, value) for key, value in leaves.items() if key in self._joint}
            return Copies(self._made, self._assigned, memo, leaves).of(held.value)

    def _memo_of(self, held: HeldObject) -> dict[int, Any]:
        """Return the copies of the present micro-batch. Of a graph that runs by itself, a function that comes again begins another run."""
        if (memos := getattr(_present, "memos", None)) is not None:
            own: dict[int, Any] = memos.setdefault(self, {})
            return own
        if id(held) in getattr(self._alone, "held", (id(held),)):
            self._alone.memo, self._alone.held = {}, set()
        self._alone.held.add(id(held))
        memo: dict[int, Any] = self._alone.memo
        return memo


_PLAIN = (FunctionType, CellType, tuple, int, float, complex, str, bytes, type(None))


def _may_be_written(leaf: Any) -> bool:
    """Return whether a hook may write into a tensor of the call, for another to read."""
    return isinstance(leaf, torch.Tensor) and not leaf.requires_grad


_SHARED = (
    "cannot trace: an autograd function gets an object with tensors of the call that a hook, or another one, holds too"
)
_CHANGES = "cannot trace: the forward of {} changes an object that the model's forward makes, and a recording runs it once more"
_HIDES = "cannot trace: {} is defined in forward, and its functions read what forward makes, which each micro-batch makes anew"


def _is_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _changed(where: str) -> TraceError:
    what = "cannot trace: a function holds an object into which forward puts a tensor after this line"
    return _refused(what, where, "register the hook after the last change of what it reads")


def _refused(what: str, where: str, hint: str) -> TraceError:
    why = "objects for the backward are made anew for each micro-batch, as they were when the call was recorded"
    return TraceError(what, where=where, why=why, hint=hint)


def remade(objects: CallObjects, held: HeldObject, values: Sequence[Any]) -> Any:
    """Return a function made anew for the present micro-batch. Plans name graph nodes after this function."""
    return objects.remade(held, values)


_present = threading.local()
"""Of a thread, `memos`: per recording, the copies of the micro-batch that runs."""


@contextmanager
def with_objects(memos: dict[CallObjects, dict[int, Any]]) -> Iterator[None]:
    """Run the block for a micro-batch whose objects are in `memos`."""
    before = getattr(_present, "memos", None)
    _present.memos = memos
    try:
        yield
    finally:
        _present.memos = before
