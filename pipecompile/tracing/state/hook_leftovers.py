"""State that the hooks of layers leave on the model, and that the rest of the forward takes away again.

    hook on a layer:   self.seen[name] = output       the node of the layer runs the hook, in every run
    forward:           out = self.seen; self.seen = {}      no node does this
    forward:           self.seen.append(x), before hooks append     a node does this after the hooks
    forward:           self.scale = y.mean(), before a hook reads it   a node does this after the hooks, too

A run would leave what eager does not, or hooks would read what the call before left. Such a layer is recorded through: its hooks are recorded as well, and no run calls them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from pipecompile.errors import TraceError
from pipecompile.torch_private.modules import backward_hooks_of, forward_hooks_of, users_hooks
from pipecompile.tracing.loaded_names import attribute_names
from pipecompile.tracing.state.effect_places import value_at
from pipecompile.tracing.state.leftover_state import StateChange
from pipecompile.tracing.state.snapshot import places_of

__all__ = ["HookLeftovers", "UndoneHooks", "names_of_hooks"]


class UndoneHooks(TraceError):
    """The forward takes away what hooks of `layers` have left. Another recording goes through these layers."""

    def __init__(self, layers: Sequence[nn.Module], name: str) -> None:
        self.layers = layers
        super().__init__(code="PC114", why=f"the forward takes away what hooks leave in {name}")


def names_of_hooks(hooks: Sequence[Any]) -> frozenset[str]:
    """Return the names of attributes in the code of hooks."""
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    codes = [getattr(getattr(one, "__func__", one), "__code__", None) for one in functions]
    return frozenset[str]().union(*(attribute_names(code) for code in codes if code is not None))


class HookLeftovers:
    """The changes that the hooks of layers, each one node, have left on the model since construction."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._left: dict[tuple[int, Any], tuple[nn.Module, StateChange]] = {}

    @property
    def has_items(self) -> bool:
        """Whether hooks have appended to a list: only the next call shows whether the forward empties it."""
        return any(change.key is None for _, change in self._left.values())

    @property
    def names(self) -> frozenset[str]:
        """The names of what hooks of the user have left."""
        changes = [change for layer, change in self._left.values() if any(map(users_hooks, forward_hooks_of(layer)))]
        paths = {id(vars(module)): f"{path}." for path, module in self.model.named_modules() if path} if changes else {}
        return frozenset(paths.get(id(change.place.container), "") + change.name for change in changes)

    def note(self, layer: nn.Module, changes: Sequence[StateChange]) -> None:
        """Note what the hooks of a layer have changed. What hooks themselves remove again is forgotten."""
        emptied = {id(change.place.container) for change in changes if change.is_removal}
        self._left = {key: one for key, one in self._left.items() if key[0] not in emptied}
        for change in changes:
            if not change.is_removal:
                key = id(change.value) if change.key is None else change.key
                self._left[id(change.place.container), key] = layer, change

    def check(self, changes: Sequence[StateChange]) -> None:
        """Raise UndoneHooks if the forward, which left `changes` beside what hooks left, has taken that away or written in the same list.
        Layers with backward hooks cannot be recorded through.
        """
        if not self._left:
            return
        shared = {id(change.place.container) for change in changes if isinstance(change.place.container, list)}
        alone = {id(place.container) for place in places_of(self.model)} - shared
        undone = [one for one in self._left.values() if not _is_there(one[1], alone)]
        undone = [one for one in undone if not any(backward_hooks_of(one[0]))]
        if undone:
            raise UndoneHooks([layer for layer, _ in undone], undone[0][1].name)

    def reason_of(self, fault: TraceError) -> TraceError:
        """Return UndoneHooks for a tensor that has no node if hooks have left something: of a hooked layer, only its result has a node."""
        if fault.code != "PC107" or not self._left:
            return fault
        return UndoneHooks([layer for layer, _ in self._left.values()], "the model")


def _is_there(change: StateChange, among: set[int]) -> bool:
    """Return whether what the hook has left is still in its container, and the container `among` these."""
    container = change.place.container
    if id(container) not in among:
        return False
    if change.key is not None:
        return value_at(container, change.key) is change.value
    if isinstance(container, deque) and container.maxlen is not None:
        return True  # which drops items by itself
    held = {id(item) for item in container}
    return isinstance(container, set) or all(id(item) in held for item in change.value)
