"""Parts of a result whose structure varies from run to run, such as a list that layer drop makes shorter.

    run 1   (x, [h0, h1, h2])
    run 2   (x, [h0, h2])          ──►   (x, ?)

The recording continues with an `UnreadPart` instead of the list. Python can pass it on and read its class. Any other use is an error that
names the part, because the value read would be a constant of the recording.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from pipecompile.batching.containers import ObjectLayout, Unread
from pipecompile.errors import TraceError
from pipecompile.text.shown_value import shown
from pipecompile.torch_private import pytree
from pipecompile.tracing.user_source import caller

__all__ = ["UnreadPart", "UnreadPartError", "common_structure", "leaves_in"]

_KINDS: tuple[type, ...] = (list, tuple, dict, deque)
_KEPT = frozenset(
    "__class__ __class_getitem__ __delattr__ __dict__ __dir__ __doc__ __getattribute__ __getnewargs__ __getstate__ __hash__ "
    "__init__ __init_subclass__ __module__ __new__ __reduce__ __reduce_ex__ __repr__ __setattr__ __sizeof__ __str__ "
    "__subclasshook__ __format__".split()
)
"""Methods that every object has and that say nothing about its items."""


class UnreadPartError(TraceError):
    """The forward reads a part of which the recording knows only the class."""


class UnreadPart(Unread):
    """A container of which the recording knows only the class and `part`, its path in the result."""

    part = ""

    def __repr__(self) -> str:
        return f"<{self.part}, another one in each run>"

    __str__ = __repr__

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return _unread, (type(self).__mro__[3], self.part)

    def refuse(self) -> NoReturn:
        """Raise TraceError: the user's present line reads the part."""
        why = f"{self.part}, of a part kept whole, has another length from run to run, and is read here"
        raise UnreadPartError(code="PC111", where=caller(), why=why)

    def __copy__(self) -> UnreadPart:
        return self

    def __deepcopy__(self, _memo: Any) -> UnreadPart:
        return self


def _refuse(part: UnreadPart, *_args: Any, **_kwargs: Any) -> NoReturn:
    part.refuse()


def _unread_class(kind: type) -> type:
    methods = {name for name in (*dir(kind), "__bool__", "__radd__") if callable(getattr(kind, name, _refuse))} - _KEPT
    return type(f"Unread{kind.__name__.capitalize()}", (UnreadPart, kind), dict.fromkeys(methods, _refuse))


_CLASSES = {kind: _unread_class(kind) for kind in _KINDS}


def _unread(kind: type, part: str) -> UnreadPart:
    item = _item(lambda: made)
    made: UnreadPart = _CLASSES[kind]({item: item} if kind is dict else [item])
    made.part = part
    return made


def _item(part: Callable[[], UnreadPart]) -> Any:
    """Return the one item of a part, for code in C that reads past its methods: every function of torch, such as `torch.cat`, refuses it.
    Without an item, the part would be an empty list of sizes.
    """
    return type("_Item", (), {"__torch_function__": classmethod(lambda *_args, **_kwargs: part().refuse())})()


def common_structure(structures: Sequence[pytree.TreeSpec]) -> pytree.TreeSpec | None:
    """Return the structure that all have, a leaf in the place of a container that differs; None if there is nothing in common."""
    first = structures[0]
    if all(structure == first for structure in structures):
        return first
    heads = {
        (structure.type, str(structure.context), len(pytree.children_of_spec(structure))) for structure in structures
    }
    if len(heads) > 1 or first.is_leaf():
        return None
    children = [_child(each) for each in zip(*map(pytree.children_of_spec, structures), strict=True)]
    found = [child for child in children if child is not None]
    return pytree.TreeSpec(first.type, first.context, found) if len(found) == len(children) else None


def _child(structures: Sequence[pytree.TreeSpec]) -> pytree.TreeSpec | None:
    """Return what these children of one container have in common; a leaf if they are containers of one kind."""
    if (found := common_structure(structures)) is not None:
        return found
    kinds = {structure.type for structure in structures}
    return _LEAF if len(kinds) == 1 and kinds <= set(_KINDS) else None


_LEAF = pytree.tree_structure(0)


def leaves_in(
    structure: pytree.TreeSpec, leaves: Sequence[Any], common: pytree.TreeSpec, name: str = ""
) -> list[Any] | None:
    """Return the leaves of a value in the order of `common`, an UnreadPart for each container that is a leaf there.

    Return None if the value has another structure. `name` is that of the piece that returned the value.
    """
    try:
        return list(_leaves_in(structure, iter(leaves), common, f"{name}(...)"))
    except _OtherStructure:
        return None


class _OtherStructure(Exception):
    """The structure of a value is not the expected one."""


def _leaves_in(structure: pytree.TreeSpec, leaves: Iterator[Any], common: pytree.TreeSpec, path: str) -> Iterator[Any]:
    if structure.is_leaf() and common.is_leaf():
        yield next(leaves)
    elif common.is_leaf() and structure.type in _KINDS:
        for _ in range(structure.num_leaves):
            next(leaves)
        yield _unread(structure.type, path)
    else:
        inner, outer = pytree.children_of_spec(structure), pytree.children_of_spec(common)
        if (structure.type, structure.context, len(inner)) != (common.type, common.context, len(outer)):
            raise _OtherStructure
        for name, *pair in zip(_names(structure), inner, outer, strict=True):
            yield from _leaves_in(pair[0], leaves, pair[1], f"{path}{name}")


def _names(structure: pytree.TreeSpec) -> list[str]:
    """Return how Python reaches each child of a container."""
    layout, count = structure.context, len(pytree.children_of_spec(structure))
    if isinstance(layout, ObjectLayout):
        return [*(f"[{shown(key)}]" for key in layout.keys), *(f".{name}" for name in layout.own_attributes)]
    keys = layout if structure.type is dict else range(count)
    return [f"[{shown(key)}]" for key in keys]
