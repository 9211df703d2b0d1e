"""Names outside of a model that its forward binds: they are bound as before when a recording or a check ends.

    global LAST; LAST = h          a global of the function's module
    nonlocal last; last = h        a variable of the function around it
    type(self).last = h            an attribute of a class
    settings.last = h              an attribute of a module
    forward.last = h               an attribute of a function
    LAST.set(h)                    a context variable, with its context as what binds it

Only names that some user function binds are looked at. What an object has is restored by `function_state`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

from pipecompile.tracing.loaded_names import bound_attributes, bound_globals, names_in
from pipecompile.tracing.reachable_code import ReachableCode, is_foreign

__all__ = ["OuterBinding", "OuterBindings", "OuterNames"]


Holder = dict[str, Any] | type | CellType | ContextVar[Any]


class _Unbound:
    """The value of a name that is not bound."""


@dataclass(frozen=True, slots=True)
class OuterBinding:
    """The value that a name was bound to. `holder` is the globals or the module, the class, the attributes of a function, the cell of a
    variable, or a context variable.
    """

    holder: Holder
    name: str
    value: Any

    @classmethod
    def of(cls, holder: Holder, name: str) -> OuterBinding:
        """Return the present binding."""
        return cls(holder, name, _value(holder, name))

    def is_changed(self) -> bool:
        """Return whether the name is bound to another object now."""
        return _value(self.holder, self.name) is not self.value

    def restore(self) -> None:
        """Bind the name as before."""
        is_absent = self.value is _Unbound
        if isinstance(self.holder, ContextVar):
            _set(self.holder, self.value)
        elif isinstance(self.holder, CellType):
            if is_absent:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = self.value
        elif isinstance(self.holder, type):
            delattr(self.holder, self.name) if is_absent else setattr(self.holder, self.name, self.value)
        elif is_absent:
            del self.holder[self.name]
        else:
            self.holder[self.name] = self.value


def _value(holder: Holder, name: str) -> Any:
    if isinstance(holder, ContextVar):
        return holder.get(_Unbound)
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:  # empty
            return _Unbound
    return _space(holder).get(name, _Unbound)


def _set(variable: ContextVar[Any], value: Any) -> None:
    """Set a context variable; one that was not set to its default, if it has one."""
    if value is not _Unbound:
        variable.set(value)
        return
    with suppress(LookupError):
        variable.set(Context().run(variable.get))


def _space(holder: Mapping[str, Any] | type) -> Mapping[str, Any]:
    return vars(holder) if isinstance(holder, type) else holder


class OuterNames:
    """The names that the user's functions bind outside of a model or other objects, of whose classes `objects` are."""

    def __init__(self, code: ReachableCode, objects: Iterable[Any]) -> None:
        attributes = frozenset[str]().union(*(bound_attributes(one.__code__) for one in code.functions))
        variables = [(one, one.name) for one in code.objects if isinstance(one, ContextVar)]
        pairs = (*_of_functions(code.functions, attributes), *variables)
        self.names = list({(id(holder), name): (holder, name) for holder, name in pairs}.values())
        self.attributes = attributes
        self.holders: list[dict[str, Any] | type] = [*_classes(objects, code)] if attributes else []
        self.functions = code.functions if attributes else []


class OuterBindings:
    """The present bindings of names."""

    def __init__(self, names: OuterNames) -> None:
        self._attributes = names.attributes
        self._bindings = [OuterBinding.of(holder, name) for holder, name in names.names]
        holders = [*names.holders, *(vars(one) for one in names.functions)]
        self._holders = [(holder, dict(_space(holder))) for holder in holders]

    def changed(self) -> list[OuterBinding]:
        """Return the bindings that are no longer what they were."""
        others = [(holder, before) for holder, before in self._holders if not _is_same(_space(holder), before)]
        attributes = (
            OuterBinding(holder, name, before.get(name, _Unbound))
            for holder, before in others
            for name in sorted(self._attributes & {*before, *_space(holder)})
        )
        return [binding for binding in (*self._bindings, *attributes) if binding.is_changed()]


def _is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))


def _of_functions(functions: Sequence[FunctionType], attributes: frozenset[str]) -> Iterator[tuple[Holder, str]]:
    """Yield the globals, the variables around functions, and the attributes of modules that functions bind."""
    for function in functions:
        scope, code = function.__globals__, function.__code__
        yield from ((scope, name) for name in sorted(bound_globals(code)))
        yield from zip(function.__closure__ or (), code.co_freevars, strict=True)
        if bound_attributes(code):
            named = (scope[name] for name in sorted(names_in(code) & scope.keys()))
            modules = [one for one in named if isinstance(one, ModuleType) and not is_foreign(one)]
            yield from ((vars(one), name) for one in modules for name in sorted(attributes & names_in(code)))


def _classes(objects: Iterable[Any], code: ReachableCode) -> list[type]:
    """Return the user's classes: those of the objects, and those that functions name."""
    named = [one for one in code.objects if isinstance(one, type)]
    found = dict.fromkeys(base for one in (*map(type, objects), *named) for base in one.__mro__)
    return [one for one in found if not is_foreign(one)]
