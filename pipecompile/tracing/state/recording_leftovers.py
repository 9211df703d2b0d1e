"""Changes on the model during a recording: leftovers, which the graph has to make, and modules that are not what they were.

A node that calls a module runs it as it is at run time. A module that `forward` itself has changed since the beginning
cannot be called as a whole; it is recorded through, as it is at that moment:

functional_call(layer, weights, x)          weights, attributes or hooks exchanged
self.pool.kernel_size = x.shape[-2:]        an attribute set
self.norm.eval()                            a mode switched
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import fx, nn

from pipecompile.errors import RecordingWarning, TraceError
from pipecompile.torch_private.modules import HOOK_TABLES, STATE_TABLES, backward_hooks_of
from pipecompile.tracing.leaf_modules import has_own_python
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.state.hook_leftovers import HookLeftovers, UndoneHooks, names_of_hooks
from pipecompile.tracing.state.leftover_state import StateChange, StateWatch, change_keys, hooks_of, without_keys
from pipecompile.tracing.state.made_tables import MadeTable
from pipecompile.tracing.user_source import line_of, warn

__all__ = ["ModuleSnapshots", "RecordingLeftovers", "warn_of_lost", "warn_of_repetitions"]


_NAMED = 8
"""Changes that a warning names, of a model that changes something on each of its layers."""

_NOTHING = object()


class RecordingLeftovers:
    """The changes that calls leave on the model. Construct it when the fake twins are in the model's tables.

    `sized_containers` has the ids of the model's containers that have a length, `tables` what every run makes anew. `stands_for(a, b)` returns whether `a` is
    the fake twin of `b`.
    """

    def __init__(self, model: nn.Module, stands_for: Callable[[object, object], bool]) -> None:
        self.model, self.stands_for = model, stands_for
        self.watch = StateWatch(model)
        self.sized_containers = self.watch.lengths
        self.tables: tuple[MadeTable, ...] = ()
        self._lengths_read: set[int] = set()
        self.of_hooks = HookLeftovers(model)
        self._leaf_keys: set[tuple[int, Any]] = set()
        self._graph_keys: set[tuple[int, Any]] = set()
        self._left: dict[tuple[int, Any], tuple[Any, RLock]] = {}
        self._of_pieces = frozenset[str]()

    @property
    def written(self) -> frozenset[tuple[int, Any]]:
        """The (container, key) pairs that a run of the graph writes, by its own nodes and inside leaf modules."""
        return frozenset(self._leaf_keys | self._graph_keys)

    @property
    def left_names(self) -> frozenset[str]:
        """The names of what hooks of layers and pieces kept whole have left, which no node of the graph leaves."""
        return self.of_hooks.names | self._of_pieces

    def note_written(self, change: StateChange) -> None:
        """Note that a node of the graph makes this change."""
        self._graph_keys |= change_keys([change])

    def note_length_read(self, container: Any) -> None:
        """Note that Python reads the length of a container of the model: later calls may depend on it."""
        self._lengths_read.add(id(container))

    def is_length_read(self, changes: list[StateChange]) -> bool:
        """Return whether Python has read the length of a changed container."""
        return any(id(change.place.container) in self._lengths_read for change in changes)

    @contextmanager
    def leaf_call(self, module: nn.Module) -> Iterator[None]:
        """Leave out what a leaf module and its hooks change inside the block: the node runs them, so it changes the same.

        Raise TraceError if a user layer with backward hooks, which could not be kept whole, changes something.
        """
        hooks, is_users = hooks_of(module), has_own_python(module)
        if hooks and not any(backward_hooks_of(module)):
            self._check_reads(module, names_of_hooks(hooks))
        watch = StateWatch(module, *hooks) if hooks or is_users else None
        yield
        changes = watch.changes() if watch else []
        if changes and is_users:
            raise TraceError(
                f"cannot trace: {type(module).__name__} has backward hooks, and its forward changes {changes[0].name}",
                code="PC106",
                why="the layer is one call, and could not be kept whole: what it returns cannot be predicted",
                hint="register the hook on the layers inside, or on the parameters",
            )
        self._leaf_keys |= change_keys(changes)
        self.of_hooks.note(module, changes)

    def _check_reads(self, module: nn.Module, names: frozenset[str]) -> None:
        """Raise UndoneHooks if hooks of a layer name what the forward has written: nodes write it behind the layer, at the end."""
        changes = without_keys([*self.watch.changed(names)], self._leaf_keys)
        changes = [one for one in changes if not self.stands_for(one.value, one.before)]
        pieces = self.of_pieces(changes)
        for change in changes:
            if not any(change is one for one in pieces):
                raise UndoneHooks([module], change.name)

    def note_left(self, module: nn.Module, name: str, turns: RLock) -> None:
        """Note the value that a piece kept whole has left in an attribute. Its calls hold `turns`."""
        self._left[id(vars(module)), name] = vars(module)[name], turns

    def of_pieces(self, changes: Sequence[StateChange]) -> list[StateChange]:
        """Return the changes that are what pieces have left last: their Python leaves it in each run, and no node has to."""
        found = [change for change in changes if self._left_at(change)[0] is change.value]
        self._of_pieces |= {change.name for change in found}
        return found

    def turns_at(self, change: StateChange) -> RLock | None:
        """Return what a node that makes this change must hold: a piece may be between leaving the attribute and its return."""
        return self._left_at(change)[1]

    def _left_at(self, change: StateChange) -> tuple[Any, RLock | None]:
        return self._left.get((id(change.place.container), change.key), (_NOTHING, None))

    def changes(self, since: StateWatch | None = None) -> list[StateChange]:
        """Return the changes since then, by default since construction."""
        changes = without_keys((since or self.watch).changes(), self._leaf_keys)
        return [change for change in changes if not self.stands_for(change.value, change.before)]

    def warn_of_replaced(self) -> None:
        """Warn of parameters and submodules that `forward` has replaced, as if it ties weights, and that the model keeps in a pipeline."""
        changes = without_keys(self.watch.replaced(), self._leaf_keys)
        names = [one.name for one in changes if not self.stands_for(one.value, one.before)]
        if names:
            what = (
                f"{type(self.model).__name__}.forward replaces {', '.join(dict.fromkeys(names))}: a pipeline computes with what it puts"
                " there, and leaves the parameters and submodules of the model as they are. Try to replace them once, before compile"
            )
            warn(what, RecordingWarning)


_TABLES = (*STATE_TABLES, *HOOK_TABLES)
_PLAIN = (int, float, bool, str, type(None))


class ModuleSnapshots:
    """The attributes and tables of all modules. Construct it when the fake twins are in the model's tables."""

    def __init__(self, model: nn.Module) -> None:
        self._snapshots = {id(module): _attributes(module) for module in model.modules()}

    def is_unchanged(self, module: nn.Module) -> bool:
        """Return whether the module and all modules inside it are as in the snapshot."""
        return all(_same(_attributes(inner), self._snapshots.get(id(inner), {})) for inner in module.modules())

    def update(self, module: nn.Module) -> None:
        """Take a new snapshot of the module after its call: what the call changed, its node will change too."""
        for inner in module.modules():
            self._snapshots[id(inner)] = _attributes(inner)


def _attributes(module: nn.Module) -> dict[Any, Any]:
    attributes: dict[Any, Any] = dict(vars(module))
    for name in _TABLES:
        attributes.update({(name, key): value for key, value in (attributes.pop(name, None) or {}).items()})
    return attributes


def _same(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return now.keys() == then.keys() and all(_equal(value, then[key]) for key, value in now.items())


def _equal(now: Any, then: Any) -> bool:
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (tuple, list)):
        return len(now) == len(then) and all(map(_equal, now, then))
    return type(now) in _PLAIN and now == then


def warn_of_lost(lost: Sequence[str], model: nn.Module) -> None:
    """Warn about changes that no node can make."""
    if lost:
        names = list(dict.fromkeys(lost))
        more = len(names) - _NAMED
        shown = ", ".join(names) if more <= 1 else f"{', '.join(names[:_NAMED])} and {more} more"
        what = f"{type(model).__name__}.forward changes {shown} in a way that a graph cannot: a pipeline leaves this state as it is"
        warn(what, RecordingWarning)


def warn_of_repetitions(changes: Sequence[StateChange], nodes: Iterable[fx.Node], model: nn.Module) -> None:
    """Warn about counters and lists that the user's own checkpointing changes again, when a region of these nodes is recomputed."""
    inside = {noted.module: noted.region for noted in map(facts, nodes) if noted.region}
    repeated = [one for one in changes if one.place.owner in inside and (one.is_number or one.key is None)]
    if repeated:
        names = ", ".join(dict.fromkeys(change.name for change in repeated))
        place = line_of(inside[repeated[0].place.owner].source)
        what = (
            f"{type(model).__name__}.forward changes {names} in a region of torch.utils.checkpoint ({place}): a pipeline makes the"
            " change once in a forward, and not again when the region is recomputed"
        )
        warn(what, RecordingWarning)
