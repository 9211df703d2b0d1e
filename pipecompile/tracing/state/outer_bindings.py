"""Names outside of a model that its forward binds: they are bound as before when a recording or a check ends.

    global LAST; LAST = h          a global of the function's module
    nonlocal last; last = h        a variable of the function around it
    type(self).last = h            an attribute of a class
    settings.last = h              an attribute of a module
    forward.last = h               an attribute of a function

Only names that some function of the user's binds are looked at. What an object has is restored by `function_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

from pipecompile.tracing.loaded_names import bound_attributes, bound_globals, names_in
from pipecompile.tracing.reachable_code import ReachableCode, is_foreign

__all__ = ["OuterBinding", "OuterBindings"]


class _Unbound:
    """The value of a name that is not bound."""


@dataclass(frozen=True, slots=True)
class OuterBinding:
    """The value that a name was bound to. `holder` is the globals or the module, the class, the attributes of a function, or the cell of
    a variable.
    """

    holder: dict[str, Any] | type | CellType
    name: str
    value: Any

    @classmethod
    def of(cls, holder: dict[str, Any] | type | CellType, name: str) -> OuterBinding:
        """Return the present binding."""
        return cls(holder, name, _value(holder, name))

    def is_changed(self) -> bool:
        """Return whether the name is bound to another object now."""
        return _value(self.holder, self.name) is not self.value

    def restore(self) -> None:
        """Bind the name as before."""
        is_absent = self.value is _Unbound
        if isinstance(self.holder, CellType):
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


def _value(holder: dict[str, Any] | type | CellType, name: str) -> Any:
    if isinstance(holder, CellType):
        try:
            return holder.cell_contents
        except ValueError:  # empty
            return _Unbound
    return _space(holder).get(name, _Unbound)


def _space(holder: Mapping[str, Any] | type) -> Mapping[str, Any]:
    return vars(holder) if isinstance(holder, type) else holder


class OuterBindings:
    """The present bindings of the names that the user's functions bind outside of a model or other objects, of whose classes they are."""

    def __init__(self, code: ReachableCode, objects: Iterable[Any]) -> None:
        self._attributes = frozenset[str]().union(*(bound_attributes(one.__code__) for one in code.functions))
        found = _of_functions(code.functions, self._attributes)
        self._bindings = {(id(binding.holder), binding.name): binding for binding in found}
        holders: tuple[dict[str, Any] | type, ...] = ()
        if self._attributes:
            holders = (*_classes(objects, code), *(vars(one) for one in code.functions))
        self._holders = [(holder, dict(_space(holder))) for holder in holders]

    def changed(self) -> list[OuterBinding]:
        """Return the bindings that are no longer what they were."""
        attributes = (
            OuterBinding(holder, name, before.get(name, _Unbound))
            for holder, before in self._holders
            for name in sorted(self._attributes & {*before, *_space(holder)})
        )
        return [binding for binding in (*self._bindings.values(), *attributes) if binding.is_changed()]


def _of_functions(functions: Sequence[FunctionType], attributes: frozenset[str]) -> Iterator[OuterBinding]:
    """Yield the bindings of globals, of variables around functions, and of modules that functions name."""
    for function in functions:
        scope, code = function.__globals__, function.__code__
        yield from (OuterBinding.of(scope, name) for name in sorted(bound_globals(code)))
        yield from map(OuterBinding.of, function.__closure__ or (), code.co_freevars)
        if bound_attributes(code):
            named = (scope[name] for name in sorted(names_in(code) & scope.keys()))
            modules = [one for one in named if isinstance(one, ModuleType) and not is_foreign(one)]
            yield from (
                OuterBinding.of(vars(one), name) for one in modules for name in sorted(attributes & names_in(code))
            )


def _classes(objects: Iterable[Any], code: ReachableCode) -> list[type]:
    """Return the user's classes: those of the objects, and those that functions name."""
    named = [one for one in code.objects if isinstance(one, type)]
    found = dict.fromkeys(base for one in (*map(type, objects), *named) for base in one.__mro__)
    return [one for one in found if not is_foreign(one)]
