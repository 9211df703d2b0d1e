"""Log of changes by user code in the forwards of a step: a recomputation begins in the state in which its forward began.

    F0  self.n: 0 to 1     F1  self.n: 1 to 2     R0  self.n is 0 again; runs, self.n: 0 to 1; at its end self.n is 2

Pieces kept whole, hooks of layers and a loss change attributes, lists, and tensors in place, without nodes in the graph. They also read
state that effect nodes change, including those of other stages. A piece that calls `is_recomputing()` handles its own state. The log is a
chain: each change refers to the next one. A recomputation keeps the change at which its forward began, so a change is freed with the last
recomputation that may undo it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from threading import local
from typing import Any

import torch

from pipecompile.torch_private.hidden_values import is_hidden
from pipecompile.tracing.recompute_flag import questions
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.function_state import names_near, places_near, roots_near, tensors_held
from pipecompile.tracing.state.hidden_containers import identity
from pipecompile.tracing.state.outer_bindings import OuterBinding, OuterBindings, OuterNames
from pipecompile.tracing.state.snapshot import content_of, has_content, held_values, set_content
from pipecompile.tracing.state.tensor_contents import CopyBeforeWrite, is_same_memory

__all__ = ["Change", "ChangeLog", "StateHolders", "writes_noted"]

Tensors = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class Change:
    """The changes of one forward; the last of a log is empty, and has no `next`.

    containers   containers, with their contents before
    copies       tensors that were written in place, with copies from before
    memory       tensors that were given other memory (`t.data = other`), with aliases of the memory before
    bindings     names outside of the holders, as they were bound before
    """

    containers: list[tuple[Any, list[Any]]] = field(default_factory=list)
    copies: Tensors = field(default_factory=list)
    memory: Tensors = field(default_factory=list)
    bindings: list[OuterBinding] = field(default_factory=list)
    next: Change | None = None


class StateHolders:
    """The modules and functions of one stage that run user code, and the objects near them, found at the first use; and the
    places where its effect nodes write.
    """

    def __init__(self, holders: tuple[Any, ...], places: tuple[EffectPlace, ...] = ()) -> None:
        self._holders, self._places = holders, places
        self._asking: set[int] = set()

    @cached_property
    def _all(self) -> list[tuple[Any, list[Any]]]:
        return [(holder, roots_near(holder)) for holder in self._holders]

    @cached_property
    def _names(self) -> list[tuple[Any, OuterNames]]:
        return [(holder, names_near(holder)) for holder in self._holders]

    @property
    def _roots(self) -> list[tuple[Any, list[Any]]]:
        return [(holder, roots) for holder, roots in self._all if id(holder) not in self._asking]

    @contextmanager
    def questions_noted(self, holder: Any) -> Iterator[None]:
        """Leave out a holder from now on if it asks whether it is recomputed, while the block runs its code."""
        before = questions()
        yield
        if questions() != before:
            self._asking.add(id(holder))

    def own(self, pairs: list[tuple[Any, Any]], now: Iterable[Any]) -> list[tuple[Any, Any]]:
        """Return the pairs of which the first is among `now`, if holders were left out."""
        present = {identity(one) for one in now} if self._asking else set()
        return [pair for pair in pairs if not self._asking or identity(pair[0]) in present]

    def contents(self) -> list[tuple[Any, list[Any]]]:
        """Return the containers near the holders and of the places, each once, with their present contents."""
        found = [place.container for holder, roots in self._roots for place in places_near(holder, roots)]
        found += [place.container for place in self._places]
        containers = {identity(one): one for one in found}
        return [(container, content_of(container)) for container in containers.values()]

    def bindings(self) -> list[tuple[Any, OuterBindings]]:
        """Return the present bindings of the names outside that the holders bind."""
        return [(holder, OuterBindings(names)) for holder, names in self._names]

    def rebound(self, before: list[tuple[Any, OuterBindings]]) -> list[OuterBinding]:
        """Return the bindings that have changed, each once, but for those of holders that were left out."""
        present = (bindings for holder, bindings in before if id(holder) not in self._asking)
        return list({(id(one.holder), one.name): one for bindings in present for one in bindings.changed()}.values())

    @cached_property
    def of_threads(self) -> list[Any]:
        """The holders near which a `threading.local` is, whose attributes are of one thread."""
        near = ((holder, (*roots, *held_values(places_near(holder, roots)))) for holder, roots in self._all)
        return [holder for holder, values in near if any(isinstance(one, local) for one in values)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors near the holders, each once, but for those of other ranks, which nothing can write here."""
        held = {id(one): one for holder, roots in self._roots for one in tensors_held(holder, roots)}
        here = (one for one in held.values() if not is_hidden(one))
        return [one for one in here if not one.is_inference() and one.layout is torch.strided]


class _Writes:
    """The tensors that the pieces of one forward write. Nothing is prepared before the first piece runs."""

    def __init__(self, holders: StateHolders) -> None:
        self.holders = holders
        self.guard: CopyBeforeWrite | None = None
        self.aliases: Tensors = []

    @contextmanager
    def noted(self, holder: Any) -> Iterator[None]:
        """Run code of a holder in the block."""
        if self.guard is None:
            held = self.holders.tensors()
            self.guard = CopyBeforeWrite(held)
            self.aliases = [(tensor, tensor.detach()) for tensor in held]
        with self.holders.questions_noted(holder), self.guard if self.aliases else nullcontext():
            yield

    def copies(self) -> Tensors:
        """Return the tensors that were written, with copies from before."""
        return self._own(list(self.guard.copies.values())) if self.guard else []

    def moved(self) -> Tensors:
        """Return the tensors that have other memory now, with aliases of that before."""
        return self._own([(tensor, alias) for tensor, alias in self.aliases if not is_same_memory(tensor, alias)])

    def _own(self, pairs: Tensors) -> Tensors:
        return self.holders.own(pairs, self.holders.tensors()) if pairs else pairs


class _Active(local):
    """The writes of the forward that this thread runs."""

    writes: _Writes | None = None


_active = _Active()


def writes_noted(holder: Any) -> AbstractContextManager[Any]:
    """Return the context in which Python of a holder runs: what it writes is noted if a recomputation will need it."""
    return nullcontext() if _active.writes is None else _active.writes.noted(holder)


class ChangeLog:
    """The changes of the forwards of one program, in the order in which they ran. Threads that note or undo some take turns."""

    def __init__(self) -> None:
        self._end = Change()

    @contextmanager
    def noted(self, holders: StateHolders) -> Iterator[Change]:
        """Add what a forward changes inside the block. Yield the change, which the recomputation of the forward passes to `undone`."""
        change, before, outer = self._end, holders.contents(), _active.writes
        bindings = holders.bindings()
        _active.writes = writes = _Writes(holders)
        try:
            yield change
        finally:
            _active.writes = outer
            changed = [(one, content) for one, content in before if not has_content(one, content)]
            change.containers = holders.own(changed, (one for one, _ in holders.contents())) if changed else []
            change.copies, change.memory = writes.copies(), writes.moved()
            change.bindings = holders.rebound(bindings)
            change.next = self._end = Change()

    @contextmanager
    def undone(self, since: Change) -> Iterator[list[torch.Tensor]]:
        """Undo a change and all later ones for the length of the block. At its end everything is as it was at its beginning.

        Yield the tensors that have other values inside the block.
        """
        first = Change()
        while since.next is not None:
            _add_missing(first, since)
            since = since.next
        with (
            _memory_exchanged(first.memory),
            _values_exchanged(first.copies),
            _contents_exchanged(first.containers),
            _bindings_exchanged(first.bindings),
        ):
            yield [tensor for tensor, _ in (*first.copies, *first.memory)]


def _add_missing(first: Change, later: Change) -> None:
    """Add to `first` what a later change has for objects that `first` does not have yet."""
    moved = {id(tensor) for tensor, _ in first.memory}
    containers, copied = ({identity(one) for one, _ in pairs} for pairs in (first.containers, first.copies))
    first.containers += [(one, content) for one, content in later.containers if identity(one) not in containers]
    first.copies += [(one, copy) for one, copy in later.copies if id(one) not in copied | moved]
    first.memory += [(one, alias) for one, alias in later.memory if id(one) not in moved]
    bound = {(id(one.holder), one.name) for one in first.bindings}
    first.bindings += [one for one in later.bindings if (id(one.holder), one.name) not in bound]


@contextmanager
def _contents_exchanged(then: list[tuple[Any, list[Any]]]) -> Iterator[None]:
    now = [(container, content_of(container)) for container, _ in then]
    _fill(then)
    try:
        yield
    finally:
        _fill(now)


def _fill(contents: list[tuple[Any, list[Any]]]) -> None:
    for container, content in contents:
        set_content(container, content)


@contextmanager
def _bindings_exchanged(then: list[OuterBinding]) -> Iterator[None]:
    now = [OuterBinding.of(one.holder, one.name) for one in then]
    _bind(then)
    try:
        yield
    finally:
        _bind(now)


def _bind(bindings: list[OuterBinding]) -> None:
    for binding in bindings:
        if binding.is_changed():
            binding.restore()


@contextmanager
def _values_exchanged(then: Tensors) -> Iterator[None]:
    with torch.no_grad():
        now = [(tensor, tensor.detach().clone()) for tensor, _ in then]
    _write(then)
    try:
        yield
    finally:
        _write(now)


def _write(values: Tensors) -> None:
    """Write through `.data`, which leaves version counters alone: autograd may have saved the tensors."""
    for tensor, value in values:
        if tensor.shape == value.shape:
            tensor.data.copy_(value)
        else:  # `resize_`
            tensor.data = value.clone()


@contextmanager
def _memory_exchanged(then: Tensors) -> Iterator[None]:
    now = [(tensor, tensor.detach()) for tensor, _ in then]
    _give_memory(then)
    try:
        yield
    finally:
        _give_memory(now)


def _give_memory(aliases: Tensors) -> None:
    for tensor, alias in aliases:
        tensor.data = alias
